"""Scales of serving programs, merged into one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, numerics
from aqtlite.program.compiled import merged
from aqtlite.quantization.states.fixed_scale import FixedScale
from tests import common

pytestmark = pytest.mark.code("quick")


def test_merged_arrays_are_split_again():
    arrays = [jnp.array(2.0), common.normal((3, 1)), common.normal((1, 0)), jnp.ones(4)]
    how = merged.Merged.of(arrays)
    one = how.merge(arrays)
    assert one.shape == (8,)
    for got, wanted in zip(how.split(one), arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_small_scales_of_quantized_arrays_are_found():
    def quantized(rows):
        int8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
        return aqtlite.quantize(jnp.ones((rows, 2)), int8, (1,))

    fixed = FixedScale(jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32))
    tree = [jnp.ones(3), quantized(4), fixed, quantized(2**12 + 1), jnp.ones(())]
    found = merged.scales(tree)
    assert [jax.tree.leaves(tree)[i].shape for i in found] == [(4, 1), (1, 1)]

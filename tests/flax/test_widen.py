"""Serving variables whose int4 are widened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import config, kv_cache, numerics
from aqtlite.flax import widen_int4
from aqtlite.quantizer import quantize
from tests.common import assert_same, normal


@pytest.mark.parametrize("place", [lambda x: x, jax.device_get], ids=["jax", "numpy"])
def test_int4_of_either_library(place):
    weight = config.weight_only(bits=4).fwd.rhs
    q = place(quantize(jnp.array([[3.0, -7.0]]), weight, axes=1))
    wide = widen_int4(q)
    assert (q.qvalue.dtype, wide.qvalue.dtype) == (jnp.int4, jnp.int8)
    np.testing.assert_array_equal(wide.qvalue, [[3, -7]])


def test_a_widened_cache_takes_further_positions():
    int4 = {"fwd.rhs.numerics": numerics.IntSymmetric(bits=4)}
    cfg = config.update(config.qat(8), int4)
    x = normal((2, 1, 4))
    cache = kv_cache.empty((3, 1, 4), x.dtype, cfg)
    wide = widen_int4(cache)
    cache, wide = (kv_cache.append(one, x, x, cfg) for one in (cache, wide))
    assert (cache.key.qvalue.dtype, wide.key.qvalue.dtype) == (jnp.int4, jnp.int8)
    assert_same(wide.key.dequant(), cache.key.dequant())

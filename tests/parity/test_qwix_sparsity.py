"""Masks of N:M sparsity equal Qwix's, element by element."""

import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import sparsity

import aqtlite
from aqtlite import config, numerics

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 8)])
def test_masks(n, m):
    # Of so few numbers, many are equal; none is 0.
    values = np.random.default_rng(0).choice([-2.0, -1.0, 1.0, 2.0], (16, 50))
    x = jnp.asarray(values, jnp.float32)
    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=8), sparsity=config.NofM(n, m)
    )
    found = aqtlite.quantize(x, tensor, 0).qvalue != 0
    assert (found == sparsity.get_sparsity_mask(x, n, m, order="C")).all()

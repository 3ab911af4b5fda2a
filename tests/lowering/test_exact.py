"""Arithmetic that is the same in every program."""

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import exact
from tests.common import normal

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize("shape", [(), (1, 3), (2, 1, 3, 1)])
def test_functions_of_squeezed_arrays(shape):
    x, y = normal(shape), normal(shape, seed=1)

    def sum_and_difference(x, y):
        assert 1 not in x.shape + y.shape
        return jnp.stack([x + y, x - y])

    found = exact.on_squeezed(sum_and_difference, x, y)
    np.testing.assert_array_equal(found, jnp.stack([x + y, x - y]))

"""Slices replaced in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite import lowering
from tests.lowering.dots import integer_dot

X = jnp.arange(24, dtype=jnp.int8).reshape(4, 6)
UPDATE = -jnp.ones((2, 3), jnp.int8)


@pytest.mark.parametrize("starts", [(0, 0), (1, 2), (3, 5), (-2, -1)])
def test_equals_lax(starts):
    wanted = lax.dynamic_update_slice(X, UPDATE, starts)
    np.testing.assert_array_equal(lowering.update_slice(X, UPDATE, starts), wanted)
    traced = jax.jit(lowering.update_slice)(X, UPDATE, starts)
    np.testing.assert_array_equal(traced, wanted)


def test_under_vmap():
    starts = jnp.array([0, 1, 2])

    def update(function):
        return jax.vmap(lambda start: function(X, UPDATE, (start, 0)))(starts)

    np.testing.assert_array_equal(
        update(lowering.update_slice), update(lax.dynamic_update_slice)
    )


def test_an_array_that_is_read_and_returned_is_updated_once():
    def step(x, update, start, y):
        x = lowering.update_slice(x, update, (0, 0, 0, start))
        dims = ((3,), (2,)), ((0, 1), (0, 1))
        return x, integer_dot(y, x, dims)

    x, y = jnp.ones((1, 2, 8, 64), jnp.int8), jnp.ones((1, 2, 2, 8), jnp.int8)
    compiled = jax.jit(step, donate_argnums=0).lower(x, x[..., :1], 3, y).compile()
    text = compiled.as_text()
    assert len(re.findall(r"s8\S* dynamic-update-slice\(", text)) == 1
    assert not re.findall(r"s8\S* copy\(", text)

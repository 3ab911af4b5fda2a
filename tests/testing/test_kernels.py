"""The check that users run on their own kernels."""

import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite.testing import assert_kernel_equals_reference
from tests.common import normal

pytestmark = pytest.mark.code("quick")


def _scaled(factor):
    """A function that is called by a name, and may not be what its reference is."""

    @jax.jit
    def scaled_product(x, w):
        return factor * (x @ w)

    return scaled_product


def _reference(x, w):
    return 2 * jnp.einsum("nk,km->nm", x, w)


def test_a_kernel_and_its_reference():
    aqtlite.register_operation("scaled_product", _reference)
    x, w = normal((3, 8)), normal((8, 5), 1)
    assert_kernel_equals_reference("scaled_product", _scaled(2), x, w)
    with pytest.raises(AssertionError, match="'scaled_product' differs .* in result 0"):
        assert_kernel_equals_reference("scaled_product", _scaled(2.1), x, w)


def test_a_kernel_with_another_gradient():
    @jax.custom_vjp
    def wrong_gradient(x, w):
        return 2 * x @ w

    wrong_gradient.defvjp(
        lambda x, w: (2 * x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[1])
    )
    aqtlite.register_operation("wrong_gradient", _reference)
    args = normal((3, 8)), normal((8, 5), 1)
    with pytest.raises(AssertionError, match="in gradient 0 by up to"):
        assert_kernel_equals_reference("wrong_gradient", wrong_gradient, *args)
    assert_kernel_equals_reference(
        "wrong_gradient", wrong_gradient, *args, differentiate=(), mapped=()
    )


def test_a_kernel_that_is_not_registered():
    x = normal((3, 8))
    with pytest.raises(ValueError, match="no operation named 'unheard_of' is regist"):
        assert_kernel_equals_reference("unheard_of", _scaled(2), x, x.T)

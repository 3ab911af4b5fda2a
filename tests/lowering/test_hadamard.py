"""Products with Hadamard matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import hadamard
from tests.common import normal

pytestmark = pytest.mark.code("quick")

# Sylvester; Paley I of 11, 19 and 147; Paley II of 13; and products of these.
ORDERS = 4, 8, 12, 16, 20, 24, 28, 32, 48, 148, 224


@functools.cache
def matrix(order, seed=0):
    return np.asarray(hadamard.rotated(jnp.eye(order), 1, order, seed), np.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_is_an_orthogonal_matrix_of_one_magnitude(order):
    found = matrix(order)
    np.testing.assert_allclose(found @ found.T, np.eye(order), atol=1e-6)
    np.testing.assert_allclose(np.abs(found), order**-0.5, rtol=1e-6)


def test_signs_depend_on_the_seed():
    assert (matrix(16) != matrix(16, 1)).any()
    np.testing.assert_array_equal(np.abs(matrix(16)), np.abs(matrix(16, 1)))


def test_known_orders():
    """Up to 148, other multiples of 4 need other constructions."""
    known = [n for n in range(150) if hadamard.has_order(n)]
    assert sorted({*range(4, 150, 4)} - {*known}) == [52, 92, 100, 116]
    assert set(known) < set(range(4, 150, 4))


@pytest.mark.parametrize(
    ("n", "size", "order"),
    [
        (768, None, 768),
        (172, None, 4),
        (11008, None, 256),
        (7, None, 1),
        (6, None, 1),
        (96, 64, 32),
        (96, 12, 12),
        (8, 16, 8),
        (0, None, 1),
        (3, 16, 1),
    ],
)
def test_largest_order(n, size, order):
    assert hadamard.largest_order(n, size) == order


@pytest.mark.parametrize("order", [8, 12, 32])
def test_blocks_along_any_axis_and_the_gradient(order):
    x = normal((2, 3 * order, 5))
    out, vjp = jax.vjp(lambda x: hadamard.rotated(x, 1, order, 0), x)
    blocks = np.asarray(x).reshape(2, 3, order, 5)
    wanted = np.einsum("abkc,kn->abnc", blocks, matrix(order)).reshape(x.shape)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(vjp(out)[0], x, atol=1e-5)


@pytest.mark.parametrize("order", [8, 12, 32, 64])
def test_bits_do_not_depend_on_the_program(order):
    """Rows alone, transposed, and between products that could fuse with the sums."""
    x = normal((6, order))
    rotate = functools.partial(hadamard.rotated, order=order, seed=0)
    wanted = np.asarray(rotate(x, 1))
    alone = np.concatenate([rotate(x[i : i + 1], 1) for i in range(6)])
    np.testing.assert_array_equal(alone, wanted)
    np.testing.assert_array_equal(np.asarray(rotate(x.T, 0)).T, wanted)

    @jax.jit
    def between(x):
        out = rotate(x * x, 1)
        return out, jnp.square(out - 0.1 * x).sum()

    np.testing.assert_array_equal(between(x)[0], rotate(jax.jit(jnp.square)(x), 1))


def kurtosis(x):
    return float(jnp.mean(x**4) / jnp.mean(x**2) ** 2)


def test_outliers_spread_over_all_channels():
    """What had channels of 30 times the magnitude becomes nearly normal."""
    x = normal((64, 96)).at[:, [3, 17]].multiply(30)
    assert kurtosis(x) > 20
    assert abs(kurtosis(hadamard.rotated(x, 1, 96, 0)) - 3) < 0.5

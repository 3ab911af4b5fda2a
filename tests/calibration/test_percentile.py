import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aqtlite.calibration import AbsMax, Percentile
from aqtlite.numerics import IntAffine
from tests.common import normal

pytestmark = pytest.mark.code("quick")

FLOATS = st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=False)


def reference(x, percentage, axes):
    return np.percentile(
        np.abs(x), percentage, axis=axes, keepdims=True, method="inverted_cdf"
    )


@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("percentage", [1.001, 25, 50, 90, 99, 100])
def test_is_numpys(percentage, axes):
    x = normal((4, 25, 10))
    got = jax.jit(Percentile(percentage).bound, static_argnums=1)(x, axes)
    np.testing.assert_array_equal(got, reference(x, percentage, axes))


@settings(max_examples=40, deadline=None)
@given(
    x=hnp.arrays(np.float32, (3, 8), elements=FLOATS),
    percentage=st.sampled_from([12.5, 50.0, 87.5]),
)
def test_any_values(x, percentage):
    got = Percentile(percentage).bound(jnp.asarray(x), (1,))
    np.testing.assert_array_equal(got, reference(x, percentage, 1))


@pytest.mark.parametrize("axes", [(1,), (0, 2)])
@pytest.mark.parametrize("percentage", [50, 90, 100])
def test_is_numpys_on_both_sides(percentage, axes):
    """For a grid with a zero point: of the values with their signs, and zero."""
    x = normal((4, 25, 10)) + 1.0
    high, low = Percentile(percentage).range(x, axes, IntAffine(), ())
    options = {"axis": axes, "keepdims": True, "method": "inverted_cdf"}
    above, below = (np.percentile(s * x, percentage, **options) for s in (1, -1))
    np.testing.assert_array_equal(high, np.maximum(above, 0))
    np.testing.assert_array_equal(low, np.minimum(-below, 0))


def test_all_of_them_is_the_largest_magnitude():
    x = normal((8, 100))
    np.testing.assert_array_equal(
        Percentile(100).bound(x, (1,)), AbsMax().bound(x, (1,))
    )


@pytest.mark.parametrize(
    ("percentage", "count", "rank"),
    [(99.9, 1000, 999), (99.99, 10_000, 9999), (1.1, 1000, 11), (29.0, 100, 29)],
)
def test_percentages_are_decimal(percentage, count, rank):
    x = jnp.arange(1, count + 1, dtype=jnp.float32)
    assert Percentile(percentage).bound(x, (0,)) == rank


def test_ties_and_zeros():
    x = jnp.array([[2.0, -2.0, 2.0, 0.0], [0.0, -0.0, 0.0, 5.0]])
    assert Percentile(50).bound(x, (1,)).tolist() == [[2.0], [0.0]]


def test_gradient_goes_to_the_elements_of_that_magnitude():
    x = jnp.array([[2.0, -3.0, 3.0, 9.0], [1.0, -2.0, -7.0, 8.0]])
    gradient = jax.grad(lambda x: Percentile(75).bound(x, (1,)).sum())(x)
    assert gradient.tolist() == [[0.0, -0.5, 0.5, 0.0], [0.0, 0.0, -1.0, 0.0]]


@pytest.mark.code("users")
def test_nothing_is_sorted():
    def compiled(function):
        return jax.jit(function).lower(normal((64, 32))).compile().as_text()

    assert " sort(" not in compiled(lambda x: Percentile(99.0).bound(x, (0,)))
    assert " sort(" in compiled(lambda x: jnp.percentile(x, 99.0, 0))


@pytest.mark.parametrize(
    "value", [0, -1.0, 0.999, 1, 100.1, float("nan"), float("inf")]
)
def test_refuses(value):
    with pytest.raises(ValueError, match=r"Percentile\.percentage must be"):
        Percentile(value)


@pytest.mark.parametrize("value", [True, "99"])
def test_refuses_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"Percentile\.percentage must be a number"):
        Percentile(value)


def test_equal_and_hashable():
    assert Percentile(99) == Percentile(99.0)
    assert hash(Percentile(99)) == hash(Percentile(99.0))

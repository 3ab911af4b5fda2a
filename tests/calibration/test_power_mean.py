"""`AbsMean`, `RMS`, and the sum under both."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aqtlite.calibration import RMS, AbsMean, Percentile
from aqtlite.calibration.power_mean import power_mean, power_mean_of_nonzero
from tests.common import normal

pytestmark = pytest.mark.code("quick")


def reference(x, axes, p, *, of_nonzero=False):
    x = np.abs(np.asarray(x, np.float64))
    count = np.sum(x != 0, axes, keepdims=True) if of_nonzero else 1
    total = np.sum(x**p, axes, keepdims=True)
    if not of_nonzero:
        count = np.prod([x.shape[axis] for axis in axes])
    return (total / np.maximum(count, 1)) ** (1 / p)


@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)])
def test_formula(axes):
    powers = 0.125, 0.5, 1, 1.5, 2, 3, 8
    x = np.maximum(normal((7, 33, 20)), -0.5)
    x = np.where(np.abs(x) < 0.2, 0, x)

    @jax.jit
    def means(x):
        return [
            [f(x, axes, p) for f in (power_mean, power_mean_of_nonzero)] for p in powers
        ]

    for p, (of_all, of_nonzero) in zip(powers, means(x), strict=True):
        np.testing.assert_allclose(of_all, reference(x, axes, p), rtol=2e-6)
        wanted = reference(x, axes, p, of_nonzero=True)
        np.testing.assert_allclose(of_nonzero, wanted, rtol=2e-6)


MAGNITUDES = st.floats(2.0**-100, 2.0**120, width=32)
FLOATS = st.one_of(st.just(0.0), MAGNITUDES, MAGNITUDES.map(lambda x: -x))


@settings(max_examples=60, deadline=None)
@given(x=hnp.arrays(np.float32, (3, 8), elements=FLOATS), p=st.sampled_from([1.0, 2.0]))
def test_any_values(x, p):
    got = power_mean(jnp.asarray(x), (1,), p)
    np.testing.assert_allclose(got, reference(x, (1,), p), rtol=1e-6)
    largest = np.abs(x).max(1, keepdims=True)
    assert np.all(got <= largest * (1 + 1e-6))


@pytest.mark.parametrize("size", [1, 2, 3, 255, 257, 70_001, 3_000_001])
def test_no_sum_overflows(size):
    """Terms are as large as they get."""

    @jax.jit
    def means(x):
        return power_mean(x, (1,), 1.0), power_mean(3 * x, (1,), 2.0)

    first, second = means(np.ones((1, size), np.float32))
    np.testing.assert_allclose(first, [[1.0]], rtol=3e-7)
    np.testing.assert_allclose(second, [[3.0]], rtol=3e-7)


def test_an_outlier_does_not_hide_the_rest():
    x = jnp.ones((1, 10_000)).at[0, 77].set(2.0**16)
    got = power_mean(x, (1,), 1.0)
    np.testing.assert_allclose(got, [[(2.0**16 + 9999) / 10_000]], rtol=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 2.5])
def test_gradient(p):
    x = normal((3, 20)).at[0, :5].set(0)

    def plain(x):
        count = jnp.sum(x != 0, 1, keepdims=True)
        powers = jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)) ** p)
        return jnp.sum((jnp.sum(powers, 1, keepdims=True) / count) ** (1 / p))

    def ours(x):
        return jnp.sum(power_mean_of_nonzero(x, (1,), p))

    got, wanted = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(plain)(x)))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_too_many_elements():
    x = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    with pytest.raises(ValueError, match="the largest number of them is 2"):
        jax.jit(lambda x: power_mean(x, (0, 1), 1.0)).lower(x)


@pytest.mark.parametrize("calibration", [RMS(3), AbsMean(), Percentile(99)])
def test_axes_of_unknown_size(calibration):
    (size,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((size, 8), jnp.float32)
    function = jax.jit(lambda x: calibration.bound(x, (0,)))
    with pytest.raises(ValueError, match="sizes are not known; export with a fixed"):
        jax.export.export(function)(x)
    rows = jax.export.export(jax.jit(lambda x: calibration.bound(x, (1,))))(x)
    np.testing.assert_array_equal(
        rows.call(normal((4, 8))), calibration.bound(normal((4, 8)), (1,))
    )


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-40])
def test_refuses(value):
    for make, name in (
        (lambda: AbsMean(p=value), r"AbsMean\.p"),
        (lambda: AbsMean(clipping_scale=value), r"AbsMean\.clipping_scale"),
        (lambda: RMS(value), r"RMS\.factor"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            make()


@pytest.mark.parametrize("value", [True, "1"])
def test_refuses_what_is_no_number(value):
    for make in (
        lambda: AbsMean(p=value),
        lambda: AbsMean(clipping_scale=value),
        lambda: RMS(value),
    ):
        with pytest.raises(TypeError, match="must be a number"):
            make()


@pytest.mark.parametrize("p", [0.1, 9])
def test_refuses_extreme_powers(p):
    with pytest.raises(ValueError, match=r"AbsMean\.p must be from 1/8 to 8"):
        AbsMean(p=p)


def test_equal_and_hashable():
    assert AbsMean(p=1, clipping_scale=2) == AbsMean(p=1.0, clipping_scale=2.0)
    assert hash(RMS(3)) == hash(RMS(3.0))

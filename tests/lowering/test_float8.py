"""Conversions between float32 and floats of 8 bits, against those of ml_dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import float8

NAMES = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
of_each = pytest.mark.parametrize("name", NAMES)


def all_values(name):
    return np.arange(2**8, dtype=np.uint8).view(jnp.dtype(name))


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@of_each
def test_widens_all_values(name):
    """Infinities and NaN, too, whose sign and payload ml_dtypes chooses otherwise."""
    values = all_values(name)
    wanted = values.astype(np.float32)
    got = np.asarray(jax.jit(float8.widened)(values))
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(bits(got)[is_number], bits(wanted)[is_number])
    np.testing.assert_array_equal(np.isnan(got), ~is_number)


@of_each
def test_widens_as_xla(name):
    values = jnp.asarray(all_values(name))
    wanted = jax.jit(lambda x: x.astype(jnp.float32))(values)
    np.testing.assert_array_equal(bits(jax.jit(float8.widened)(values)), bits(wanted))


@of_each
def test_narrows_all_finite_values(name):
    values = all_values(name)
    values = values[np.isfinite(values.astype(np.float32))]
    narrowed = jax.jit(lambda x: float8.narrowed(x, values.dtype))
    got = narrowed(values.astype(np.float32))
    np.testing.assert_array_equal(bits(got), bits(values))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e8m0fnu", "int8"])
def test_converts_others_plainly(dtype):
    x = jnp.array([1, 2, 64], dtype)
    np.testing.assert_array_equal(float8.widened(x), [1, 2, 64])
    narrowed = float8.narrowed(jnp.array([1.0, 2.0, 64.0]), x.dtype)
    assert narrowed.dtype == x.dtype and (narrowed == x).all()


def test_maps_and_differentiates():
    x = jnp.asarray(all_values("float8_e5m2")[:24]).reshape(4, 6)
    mapped = jax.vmap(float8.widened, in_axes=1, out_axes=1)(x)
    np.testing.assert_array_equal(mapped, x.astype(jnp.float32))

    def through(x):
        return float8.widened(float8.narrowed(x, jnp.float8_e5m2)).sum()

    np.testing.assert_array_equal(jax.grad(through)(jnp.ones(3)), jnp.ones(3))


def test_other_platforms_convert():
    def lowered(platform):
        traced = jax.jit(float8.widened).trace(jnp.ones(3, jnp.float8_e4m3fn))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "bitcast_convert" not in lowered("tpu") + lowered("cuda")
    assert "bitcast_convert" in lowered("cpu")

"""Reductions in two steps give what one step gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqtlite import reduction

SHAPES = [(128, 128), (4, 64, 96), (16, 1024), (1000, 33), (129, 130), (20000,), (0, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_largest_magnitude(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    subsets = [(), *((axis,) for axis in range(len(shape))), tuple(range(len(shape)))]
    for axes in subsets:
        got = jax.jit(reduction.largest_magnitude, static_argnums=1)(x, axes)
        wanted = np.abs(x).max(axes, keepdims=True, initial=0)
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_largest_magnitude_of_what_is_not_finite(bad):
    x = np.zeros((128, 256), np.float32)
    x[3, 7], x[3, 8], x[5, 1] = bad, -np.inf, -0.0
    got = np.asarray(reduction.largest_magnitude(jnp.asarray(x), (1,)))
    np.testing.assert_array_equal(got, np.abs(x).max(1, keepdims=True))
    assert got[5, 0] == 0 and not np.signbit(got).any()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 40_000), st.integers(0, 2**32 - 1))
def test_wrapping_sum(size, seed):
    x = np.random.default_rng(seed).integers(0, 2**32, size, np.uint32)
    assert reduction.wrapping_sum(jnp.asarray(x)) == x.sum(dtype=np.uint32)


def test_sharded_arrays():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (256, 128))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        sharded = jax.device_put(x, sharding)
        got = reduction.largest_magnitude(sharded, (0,))
        words = jax.lax.bitcast_convert_type(sharded, jnp.uint32)
        total = reduction.wrapping_sum(words)
    np.testing.assert_array_equal(got, reduction.largest_magnitude(x, (0,)))
    words = jax.lax.bitcast_convert_type(x, jnp.uint32)
    assert int(total) == int(reduction.wrapping_sum(words))

"""Reductions in two steps give what one step gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import reduction
from tests.common import normal

SHAPES = [(128, 128), (4, 64, 96), (16, 1024), (1000, 33), (129, 130), (20000,), (0, 9)]
SHAPES += [(1, 64), (1, 1, 192), (8192,), (1, 296), (9000, 1), (1, 0)]


def largest_magnitudes(x, subsets):
    """Of each subset of axes, in one program."""
    return jax.jit(lambda x: [reduction.largest_magnitude(x, s) for s in subsets])(x)


@pytest.mark.parametrize("shape", SHAPES)
def test_largest_magnitude(shape):
    x = normal(shape)
    subsets = [(), *((axis,) for axis in range(len(shape))), tuple(range(len(shape)))]
    for axes, got in zip(subsets, largest_magnitudes(x, subsets), strict=True):
        wanted = np.abs(x).max(axes, keepdims=True, initial=0)
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [8, 33, 64, 100, 128, 200, 256, 513])
def test_what_is_not_finite_shows_at_every_size(size, bad):
    x = np.ones((size, size), np.float32)
    x[3, 7], x[5, 1] = bad, -0.0
    for axis, got in enumerate(largest_magnitudes(x, [(0,), (1,)])):
        finite = np.isfinite(np.asarray(got)).ravel()
        assert not finite[7 if axis == 0 else 3]
        assert finite.sum() == size - 1
        assert not np.signbit(got).any()


def test_gradient_of_the_largest_magnitude():
    x = normal((128, 256))

    def total(function):
        return jax.jit(jax.grad(lambda x: (function(x) ** 2).sum()))(x)

    got = total(lambda x: reduction.largest_magnitude(x, (1,)))
    np.testing.assert_array_equal(got, total(lambda x: jnp.abs(x).max(1)))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what CPUs need")
@pytest.mark.parametrize("shape", [(1024, 512), (4, 128, 1024), (8, 64, 8, 128)])
def test_no_array_of_what_is_reduced(shape):
    """The reduction does not write its operand to memory."""

    def temporary_bytes(reduce):
        compiled = jax.jit(lambda x: reduce(3 * x)).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def largest(axis):
        return lambda x: reduction.largest_magnitude(x, (axis,))

    x = normal(shape)
    for reduce in (largest(0), largest(x.ndim - 1)):
        assert temporary_bytes(reduce) < 0.3 * x.nbytes


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what CPUs need")
@pytest.mark.parametrize("size", [64, 192, 512, 768, 8192])
def test_a_row_takes_no_further_kernel(size):
    """XLA:CPU makes reductions of longer axes windows first."""
    largest = jax.jit(lambda x: reduction.largest_magnitude(x, (1,)))
    assert "reduce-window" not in largest.lower(normal((1, size))).compile().as_text()


def test_sharded_arrays():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = normal((256, 128))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        sharded = jax.device_put(x, sharding)
        got = reduction.largest_magnitude(sharded, (0,))
    np.testing.assert_array_equal(got, reduction.largest_magnitude(x, (0,)))

"""Pooling over windows of two spatial axes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.arithmetic.rescaling import NO_CLAMP, Clamp
from aqtlite.edge.grid import Grid


def average_pool_2d(
    x: jax.Array,
    x_grid: Grid,
    grid: Grid,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] | str = "VALID",
    clamp: Clamp = NO_CLAMP,
) -> jax.Array:
    """AVERAGE_POOL_2D of int8, then the QUANTIZE that the converter writes.

    The integers are averaged as they are, on the grid of x: their sum, divided by the
    number of elements that are no padding, a half rounded away from zero. The result is
    brought to another grid by `rescaling.rescale`.

    Source: TFLite, ``reference/integer_ops/pooling.h``, under every resolver.

    Args:
        x: int8, shape (batch, height, width, channels).
        x_grid: grid of x.
        grid: grid of the result.
        window: its height and width.
        strides: strides of the window.
        padding: (low, high) for each spatial axis, "SAME" or "VALID".
        clamp: the range of a fused activation, on the grid of x.
    """
    window, strides = (1, *window, 1), (1, *strides, 1)
    pairs = _pairs(x.shape, window, strides, padding)
    zero = np.int32(0)
    sums = lax.reduce_window(x.astype(jnp.int32), zero, lax.add, window, strides, pairs)
    ones = jnp.ones((1, *x.shape[1:3], 1), jnp.int32)
    counts = lax.reduce_window(ones, zero, lax.add, window, strides, pairs)
    # Integers are divided toward zero.
    averages = lax.div(sums + lax.sign(sums) * (counts // 2), counts + 0 * sums)
    low, high = rescaling.limits(x_grid, clamp)
    clamped = jnp.clip(averages, low, high).astype(x.dtype)
    return rescaling.rescale(clamped, x_grid, grid)


def max_pool_2d(
    x: jax.Array,
    x_grid: Grid,
    grid: Grid,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] | str = "VALID",
    clamp: Clamp = NO_CLAMP,
) -> jax.Array:
    """MAX_POOL_2D of int8, then the QUANTIZE that the converter writes.

    Args:
        x: int8, shape (batch, height, width, channels).
        x_grid: grid of x.
        grid: grid of the result.
        window: its height and width.
        strides: strides of the window.
        padding: (low, high) for each spatial axis, "SAME" or "VALID".
        clamp: the range of a fused activation, on the grid of x.
    """
    window, strides = (1, *window, 1), (1, *strides, 1)
    pairs = _pairs(x.shape, window, strides, padding)
    smallest = np.asarray(x_grid.limits[0], x.dtype)
    largest = lax.reduce_window(x, smallest, lax.max, window, strides, pairs)
    low, high = rescaling.limits(x_grid, clamp)
    clamped = jnp.clip(largest, low, high).astype(x.dtype)
    return rescaling.rescale(clamped, x_grid, grid)


def _pairs(shape, window, strides, padding):
    if isinstance(padding, str):
        return tuple(lax.padtype_to_pads(shape, window, strides, padding))
    return ((0, 0), *map(tuple, padding), (0, 0))

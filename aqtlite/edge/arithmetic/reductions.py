"""Reductions over axes, and pooling over windows."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import fixed_point, rescaling
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized


def mean(
    x: Quantized, grid: Grid, axes: Sequence[int], kernels: Kernels = "xnnpack"
) -> jax.Array:
    """MEAN.

    XNNPACK (``reduce-nd.c``), int8: `_scaled_sum` with ``1 / count`` in float32. TFLite
    (``reference/reduce.h``): ``x_scale / scale`` in fixed point, with the multiplier
    shifted left by ``floor(log2(count))`` bits, as far as the exponent allows, and
    divided by the count; then `fixed_point.rounded_away`.

    Args:
        x: int8 or int16.
        grid: grid of the result.
        axes: axes to reduce, not negative.
        kernels: LiteRT kernels to simulate.
    """
    count = math.prod(x.qvalue.shape[axis] for axis in axes)
    if kernels == "xnnpack" and grid.dtype == "int8":
        factor = np.float32(1) / np.float32(count)
        return _scaled_sum(x, grid, axes, factor)
    scales = np.float64(np.float32(x.grid.scale)), np.float64(np.float32(grid.scale))
    multiplier, shift = fixed_point.quantized_multiplier(scales[0] / scales[1])
    left = min(count.bit_length() - 1, 31 + int(shift))
    divided = np.asarray((int(multiplier) << left) // count, np.int32)
    sums = jnp.sum(x.qvalue, tuple(axes), jnp.int32)
    centered = sums - count * x.grid.zero_point
    product = fixed_point.rounded_away(centered, divided, np.asarray(shift - left))
    return rescaling.shifted(product, grid)


def total(x: Quantized, grid: Grid, axes: Sequence[int]) -> jax.Array:
    """SUM of int8: XNNPACK's `mean` with the factor 1 instead of ``1 / count``.

    TFLite's optimized kernel agrees; its reference kernel reads int8 as uint8.

    Args:
        x: int8.
        grid: grid of the result.
        axes: axes to reduce, not negative.
    """
    return _scaled_sum(x, grid, axes, np.float32(1))


def _scaled_sum(
    x: Quantized, grid: Grid, axes: Sequence[int], factor: np.floating
) -> jax.Array:
    """``rint(float32(sum(x)) * m + z)``, clamped.

    With ``m = x_scale / scale * factor`` and
    ``z = zero_point - count * x's zero point * m``, all in float32.

    Source: XNNPACK, ``src/operators/reduce-nd.c`` and its reference conversion.
    """
    count = math.prod(x.qvalue.shape[axis] for axis in axes)
    sums = jnp.sum(x.qvalue, tuple(axes), jnp.int32)
    multiplier = np.float32(np.float32(x.grid.scale) / np.float32(grid.scale) * factor)
    offset = np.float32(count * x.grid.zero_point) * multiplier
    zero_point = np.float32(np.float32(grid.zero_point) - offset)
    product = _rounded_product(sums, multiplier)
    low, high = (np.float32(bound) for bound in grid.limits)
    rounded = lax.round(product + zero_point, lax.RoundingMethod.TO_NEAREST_EVEN)
    return lax.clamp(low, rounded, high).astype(grid.dtype)


def _rounded_product(sums: jax.Array, factor: np.floating) -> jax.Array:
    """``float32(sums) * factor``, rounded before anything is added to it.

    LLVM would contract the product and an addition into one fused multiply-add. The
    bitwise or in between changes nothing, since no sum is so negative, but LLVM cannot
    know that.
    """
    words = lax.bitcast_convert_type(sums.astype(jnp.float32) * factor, jnp.int32)
    zeros = (sums < -(2**30)).astype(jnp.int32)
    return lax.bitcast_convert_type(words | zeros, jnp.float32)


def average_pool_2d(
    x: jax.Array, window: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    """AVERAGE_POOL_2D of int8, without padding.

    Integers are averaged without rescaling: their sum divided by their number, rounded
    with halves away from zero.

    Source: TFLite, ``reference/integer_ops/pooling.h``; the same for all kernels.

    Args:
        x: int8, shape (batch, height, width, channels).
        window: height and width of the window.
        strides: strides of the window.
    """
    count = np.int32(math.prod(window))
    window, strides = (1, *window, 1), (1, *strides, 1)
    wide, zero = x.astype(jnp.int32), np.int32(0)
    sums = lax.reduce_window(wide, zero, lax.add, window, strides, "VALID")
    # lax.div truncates, so adding half the divisor away from zero rounds to nearest.
    averages = lax.div(sums + lax.sign(sums) * (count // 2), jnp.full_like(sums, count))
    return averages.astype(x.dtype)

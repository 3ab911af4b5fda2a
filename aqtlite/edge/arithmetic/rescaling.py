"""Conversion of sums, floats and other grids' integers to the integers of a grid."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import fixed_point
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.lowering import exact

Clamp = tuple[float, float]
"""Range of a fused activation, such as (0, 6) for relu6."""

NO_CLAMP: Clamp = (-math.inf, math.inf)
_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


def limits(grid: Grid, clamp: Clamp = NO_CLAMP) -> tuple[int, int]:
    """Smallest and largest integer of a result with a fused activation.

    A bound is ``rint(bound / scale + zero_point)`` in float32 (XNNPACK,
    ``xnn_qs8_quantize``).

    Args:
        grid: grid of the result.
        clamp: range of a fused activation.

    >>> limits(Grid(np.float32(0.05), -128), (0.0, 6.0))
    (-128, -8)
    """
    low, high = grid.limits
    scale, zero_point = np.float32(grid.scale), np.float32(grid.zero_point)
    bounds = [np.float32(bound) / scale + zero_point for bound in clamp]
    smallest, largest = (np.rint(np.clip(bound, low, high)) for bound in bounds)
    return int(smallest), int(largest)


def requantize(
    sums: jax.Array,
    multiplier: jax.Array | np.floating,
    grid: Grid,
    clamp: Clamp = NO_CLAMP,
) -> jax.Array:
    """``rint(float32(sums) * multiplier) + zero_point``, clamped.

    Halves are rounded to even.

    Source: XNNPACK, the fp32 requantization of its qs8 kernels on x86.

    Args:
        sums: int32.
        multiplier: float32, of shape () or one for each channel on the last axis.
        grid: grid of the result.
        clamp: range of a fused activation.
    """
    low, high = limits(grid, clamp)
    product = sums.astype(jnp.float32) * jnp.asarray(multiplier, jnp.float32)
    z = np.float32(grid.zero_point)
    rounded = lax.round(product, _TO_EVEN)
    within = lax.clamp(np.float32(low) - z, rounded, np.float32(high) - z)
    return (within.astype(jnp.int32) + grid.zero_point).astype(grid.dtype)


def shifted(products: jax.Array, grid: Grid, clamp: Clamp = NO_CLAMP) -> jax.Array:
    """``products + zero_point``, clamped, for int32 on the scale of the grid."""
    low, high = limits(grid, clamp)
    z = grid.zero_point
    return (jnp.clip(products, low - z, high - z) + z).astype(grid.dtype)


def rescale(x: Quantized, grid: Grid, kernels: Kernels = "xnnpack") -> jax.Array:
    """QUANTIZE of integers: conversion from one grid to another.

    XNNPACK (``xnn_init_qs8_cvt_scalar_params``), int8 to int8: the ratio of the scales
    becomes ``m = rint(256 * ratio)``; the result is
    ``((x - x's zero point) * m + 128) >> 8``, plus the zero point, and often off by one
    because m has so few bits. TFLite's kernel runs ratios outside [2**-8, 2**7].

    TFLite (``Requantize``), other ratios and int16: the ratio in fixed point. Between
    int8 grids, the optimized kernel rounds like `fixed_point.rounded_upward`, except
    for the last ``size % 16`` elements; everything else is rounded like
    `fixed_point.rounded_away`.

    Args:
        x: int8 or int16.
        grid: grid of the result. If x has this grid, it is returned unchanged.
        kernels: LiteRT kernels to simulate.
    """
    scale = np.float32(x.grid.scale)
    is_same = x.grid.dtype == grid.dtype and x.grid.zero_point == grid.zero_point
    if is_same and scale == np.float32(grid.scale):
        return jnp.asarray(x.qvalue)
    ratio = scale / np.float32(grid.scale)
    is_narrow = x.grid.dtype == grid.dtype == "int8"
    if kernels == "xnnpack" and is_narrow and 2.0**-8 <= ratio <= 2.0**7:
        multiplier = int(np.rint(np.float32(256) * ratio))
        return shifted((x.centered * multiplier + 128) >> 8, grid)
    real = np.float64(scale) / np.float64(np.float32(grid.scale))
    fixed = fixed_point.quantized_multiplier(real)
    rounding: fixed_point.Rounding = (
        "upward" if is_narrow and kernels != "reference" else "away"
    )
    return shifted(fixed_point.multiply(x.centered, *fixed, rounding), grid)


def quantize(x: jax.Array, grid: Grid, kernels: Kernels = "xnnpack") -> jax.Array:
    """QUANTIZE of floats.

    ``rint(x * (1 / scale)) + zero_point``, clamped (XNNPACK,
    ``xnn_init_f32_qs8_cvt_scalar_params``; TFLite's optimized kernel for int16).
    TFLite's reference kernel rounds ``x / scale``, halves away from zero.

    Args:
        x: float32, of magnitude below 2**31 steps; TFLite's kernels overflow beyond.
        grid: grid of the result.
        kernels: LiteRT kernels to simulate.
    """
    x = exact.algebraic_barrier(x.astype(jnp.float32))
    scale = np.float32(grid.scale)
    low, high = (np.float32(bound - grid.zero_point) for bound in grid.limits)
    if kernels == "reference":
        # XLA multiplies by the reciprocal of a constant divisor: hide that it is one.
        divisor = scale + x * np.float32(0)
        rounded = lax.round(x / divisor, lax.RoundingMethod.AWAY_FROM_ZERO)
    else:
        rounded = lax.round(x * (np.float32(1) / scale), _TO_EVEN)
    within = lax.clamp(low, rounded, high).astype(jnp.int32)
    return (within + grid.zero_point).astype(grid.dtype)

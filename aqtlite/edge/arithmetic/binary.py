"""Elementwise operators of two arrays, with broadcasting."""

import jax
import numpy as np

from aqtlite.edge.arithmetic import fixed_point, rescaling, scales
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.arithmetic.rescaling import NO_CLAMP, Clamp
from aqtlite.edge.grid import Grid, Quantized

_ONE = np.float32(1)


def add(
    x: Quantized,
    y: Quantized,
    grid: Grid,
    clamp: Clamp = NO_CLAMP,
    kernels: Kernels = "xnnpack",
    *,
    sign: int = 1,
) -> jax.Array:
    """ADD.

    XNNPACK, int8 (``xnn_init_qs8_add_minmax_scalar_params``): the ratios of the scales
    of x and y to the scale of the result become integers ``a`` and ``b`` of 21 bits
    with a common exponent; the result is
    ``(a * (x - x0) + b * (y - y0) + half) >> shift``. TFLite's kernel runs ratios
    outside [2**-10, 2**8).

    TFLite (``reference/add.h``): both operands, shifted left by 20 bits (15 for int16),
    are rescaled to twice the larger scale, added, and rescaled to the scale of the
    result, each time with `fixed_point.rounded_away`.

    Args:
        x: int8 or int16.
        y: integers like x, of a shape that broadcasts with x.
        grid: grid of the result.
        clamp: range of a fused activation.
        kernels: LiteRT kernels to simulate.
        sign: -1 negates the integers of y after the zero point.
    """
    given = x.grid.scale, y.grid.scale, grid.scale

    def of_tflite() -> jax.Array:
        return _add_of_tflite(x.centered, y.centered, given, grid, clamp, sign)

    if kernels != "xnnpack" or grid.dtype != "int8":
        return of_tflite()
    xp = fixed_point.namespace(*given)
    ratios = [scales.factor(s, _ONE, given[2]) for s in given[:2]]
    largest, smallest = xp.maximum(*ratios), xp.minimum(*ratios)
    within = (smallest >= 2.0**-10) & (largest < 2.0**8)

    def of_xnnpack() -> jax.Array:
        shift = 21 - xp.frexp(largest)[1]
        a, b = (xp.rint(xp.ldexp(ratio, shift)).astype(np.int32) for ratio in ratios)
        total = a * x.centered + sign * b * y.centered + (1 << (shift - 1))
        return rescaling.shifted(total >> shift, grid, clamp)

    return fixed_point.where(within, of_xnnpack, of_tflite)


def sub(
    x: Quantized,
    y: Quantized,
    grid: Grid,
    clamp: Clamp = NO_CLAMP,
    kernels: Kernels = "xnnpack",
) -> jax.Array:
    """SUB: `add` with the integers of y negated."""
    return add(x, y, grid, clamp, kernels, sign=-1)


def mul(
    x: Quantized,
    y: Quantized,
    grid: Grid,
    clamp: Clamp = NO_CLAMP,
    kernels: Kernels = "xnnpack",
) -> jax.Array:
    """MUL.

    XNNPACK, int8 (``xnn_init_qs8_mul_minmax_scalar_params``):
    ``rint(float32((x - x0) * (y - y0)) * m) + zero_point`` with
    ``m = x_scale * y_scale / scale`` in float32. TFLite's kernel runs m outside
    [2**-16, 2**8).

    TFLite (``reference/mul.h``): the same m in fixed point, `fixed_point.rounded_away`.

    Args:
        x: int8 or int16.
        y: integers like x, of a shape that broadcasts with x.
        grid: grid of the result.
        clamp: range of a fused activation.
        kernels: LiteRT kernels to simulate.
    """
    product = x.centered * y.centered
    multiplier = scales.factor(x.grid.scale, y.grid.scale, grid.scale)

    def of_xnnpack() -> jax.Array:
        return rescaling.requantize(product, multiplier, grid, clamp)

    def of_tflite() -> jax.Array:
        fixed = scales.fixed_factor(multiplier, _ONE, _ONE)
        rounded = fixed_point.rounded_away(product, *fixed)
        return rescaling.shifted(rounded, grid, clamp)

    if kernels != "xnnpack" or grid.dtype != "int8":
        return of_tflite()
    within = (multiplier >= 2.0**-16) & (multiplier < 2.0**8)
    return fixed_point.where(within, of_xnnpack, of_tflite)


def _add_of_tflite(x, y, given, grid, clamp, sign):
    left = 20 if grid.dtype == "int8" else 15
    xp = fixed_point.namespace(*given)
    twice = np.float32(2) * xp.maximum(*given[:2])
    # One call for all factors, since each call adds to the compile time.
    numerators = xp.stack([*given[:2], twice])
    divisors = xp.stack([twice, twice, given[2] * np.float32(2**left)])
    factors = scales.fixed_factor(numerators, _ONE, divisors)
    of_x, of_y, of_both = zip(*factors, strict=True)
    total = fixed_point.rounded_away(x << left, *of_x)
    total += sign * fixed_point.rounded_away(y << left, *of_y)
    return rescaling.shifted(fixed_point.rounded_away(total, *of_both), grid, clamp)

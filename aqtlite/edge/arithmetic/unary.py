"""Elementwise operators of one array, as tables over all int8 or int16.

If the interpreter's kernel uses a table, it is filled by the same formula; otherwise
the table holds the kernel's result for every integer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.edge.arithmetic import (
    fixed_point,
    interpolated,
    rescaling,
)
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid

Table = np.ndarray
"""Results, int8 or int16, for each integer of the input, from the smallest."""


def lookup(table: Table, x: jax.Array) -> jax.Array:
    """Looks up the elements of an int8 or int16 array in a table."""
    return jnp.asarray(table)[x.astype(jnp.int32) + table.size // 2]


def tanh(x_grid: Grid, grid: Grid, kernels: Kernels = "xnnpack") -> Table:
    """TANH.

    XNNPACK (``reference/unary-elementwise.cc``), int8: `of_xnnpack`. TFLite, int8:
    `of_tflite`. int16: `interpolated.tanh`, on LiteRT's only scale for it, 2**-15.

    Raises:
        ValueError: for int8 in the reference kernel, which computes in int16.
    """
    if x_grid.dtype == "int16":
        return _table(interpolated.tanh(x_grid), grid)
    if kernels == "reference":
        raise ValueError(
            "tanh of int8 in the reference kernels is not simulated: choose kernels "
            "'xnnpack' or 'builtin', or leave tanh in float by edge.Rule(op='tanh', "
            "is_float=True)"
        )
    fill = of_xnnpack if kernels == "xnnpack" else of_tflite
    return fill(_tanh, x_grid, grid)


def logistic(x_grid: Grid, grid: Grid, kernels: Kernels = "xnnpack") -> Table:
    """LOGISTIC, the sigmoid function; kernels as in `tanh`."""
    if x_grid.dtype == "int16":
        return _table(interpolated.logistic(x_grid), grid)
    if kernels == "xnnpack":
        return of_xnnpack(_in_float64(_sigmoid), x_grid, grid)
    return of_tflite(_sigmoid_of_float32, x_grid, grid)


def exp(x_grid: Grid, grid: Grid) -> Table:
    """EXP, `of_tflite`."""
    return of_tflite(_in_float64(np.exp), x_grid, grid)


def log(x_grid: Grid, grid: Grid) -> Table:
    """LOG, `of_tflite`; the smallest integer for arguments that are not positive."""
    scale = np.float32(grid.scale)
    smallest = np.float32(grid.limits[0] - grid.zero_point) * scale

    def transform(x: np.ndarray) -> np.ndarray:
        logarithms = np.log(np.where(x > 0, x, 1).astype(np.float64))
        return np.where(x > 0, logarithms.astype(np.float32), smallest)

    return of_tflite(transform, x_grid, grid)


def gelu(x_grid: Grid, grid: Grid) -> Table:
    """GELU in the approximation by tanh, `of_tflite`.

    ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))`` in float32
    (``reference/gelu.h``).
    """
    factor, cubic = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)

    def transform(x: np.ndarray) -> np.ndarray:
        inner = factor * (x + cubic * x * x * x)
        return np.float32(0.5) * x * (np.float32(1) + _tanh(inner))

    return of_tflite(transform, x_grid, grid)


def sqrt(x_grid: Grid, grid: Grid) -> Table:
    """SQRT: ``int(sqrt(x_scale * (x - x0)) / scale) + zero_point``, in float32.

    The quotient is truncated, not rounded. Integers below the zero point, which LiteRT
    refuses, are replaced by the zero point.

    Source: TFLite, ``SqrtEvalQuantized`` in ``kernels/elementwise.cc``.
    """
    centered = np.maximum(_centered(x_grid), 0).astype(np.float32)
    roots = np.sqrt(np.float32(x_grid.scale) * centered)
    return _table((roots / np.float32(grid.scale)).astype(np.int64), grid)


def rsqrt(x_grid: Grid, grid: Grid) -> Table:
    """RSQRT of int16, `of_tflite`. No program has it in int8 (`passes.roots`)."""
    return of_tflite(_inverse_root(grid), x_grid, grid)


def abs(x_grid: Grid, grid: Grid) -> Table:
    """ABS: the magnitude of ``x - x0``, rescaled in fixed point.

    Source: TFLite, ``AbsEvalQuantized`` in ``kernels/elementwise.cc``.
    """
    magnitudes = np.abs(_centered(x_grid))
    return _table(_scaled(magnitudes, x_grid, grid), grid)


def relu(x_grid: Grid, grid: Grid, low: float, high: float) -> Table:
    """RELU, RELU6 and RELU_N1_TO_1: rescaled in fixed point, and clamped.

    Source: TFLite, ``QuantizedReluX`` in ``kernels/activations.cc``.

    Args:
        x_grid: grid of the input.
        grid: grid of the result.
        low: smallest value of the activation.
        high: largest value of the activation.
    """
    smallest, largest = rescaling.limits(grid, (low, high))
    scaled = _scaled(_centered(x_grid), x_grid, grid)
    clamped = np.clip(scaled + grid.zero_point, smallest, largest)
    return clamped.astype(grid.dtype)


def leaky_relu(
    x_grid: Grid, grid: Grid, slope: float, kernels: Kernels = "xnnpack"
) -> Table:
    """LEAKY_RELU.

    XNNPACK, int8 (``xnn_init_qs8_lrelu_scalar_params``): ``(m * (x - x0) + 128) >> 8``
    with ``m = rint(256 * x_scale / scale)``, multiplied by the slope before rounding
    where ``x < x0``. It runs scale ratios from 2**-8 to 2**7, and products of ratio and
    slope from 2**-8 - 2**7 to 2**7 with magnitude at least 2**-8.

    TFLite, all others: both factors in fixed point.
    """
    centered = _centered(x_grid)
    ratio = np.float32(x_grid.scale) / np.float32(grid.scale)
    steepness = ratio * np.float32(slope)
    within = 2.0**-8 <= ratio <= 2.0**7 and -127.99609375 <= steepness <= 2.0**7
    is_narrow = grid.dtype == "int8"
    if kernels == "xnnpack" and is_narrow and within and np.abs(steepness) >= 2.0**-8:
        positive, negative = (
            int(np.rint(np.float32(256) * one)) for one in (ratio, steepness)
        )
        products = centered * np.where(centered >= 0, positive, negative)
        return _table((products + 128) >> 8, grid)
    product = np.float32(x_grid.scale) * np.float32(slope) / np.float32(grid.scale)
    negative_part = fixed_point.scaled(np.abs(centered), np.abs(product))
    negative_part = negative_part * np.where(product < 0, 1, -1)
    return _table(
        np.where(centered >= 0, _scaled(centered, x_grid, grid), negative_part), grid
    )


def hard_swish(x_grid: Grid, grid: Grid) -> Table:
    """HARD_SWISH in 16-bit fixed point.

    Source: TFLite, ``reference/hard_swish.h``, ``HardSwishPrepare`` in
    ``kernels/activations.cc``.

    Raises:
        ValueError: if the scale of the result is below 1 / 128 of the scale of x, which
            LiteRT refuses.
    """
    fine_scale = np.float32(1 / 128) * np.float32(x_grid.scale)
    to_result = _short_multiplier(fine_scale / np.float32(grid.scale))
    to_gate = _short_multiplier(fine_scale / np.float32(3 / 32768))
    if to_result[1] > 0:
        raise ValueError(
            f"hard_swish from scale {x_grid.scale} to scale {grid.scale}: LiteRT takes "
            "scales of the result of at least 1 / 128 of the input's; widen its range"
        )
    fine = (_centered(x_grid)) << 7
    value = _short_product(fine, to_result[0])
    gate = fine
    if to_gate[1] > 0:
        gate = _short_saturated(gate << (to_gate[1] - 1))
    gate = _short_product(gate, to_gate[0])
    if to_gate[1] > 0:
        gate = _short_saturated(gate << 1)
    else:
        gate = fixed_point.shifted_away(gate, np.asarray(-to_gate[1]))
    gate = (gate + 2**15) >> 1
    product = gate * value
    truncated = np.sign(product) * (np.abs(product) >> 15)
    right = np.asarray(-to_result[1])
    return _table(fixed_point.shifted_away(truncated, right), grid)


def of_xnnpack(
    transform: Callable[[np.ndarray], np.ndarray], x_grid: Grid, grid: Grid
) -> Table:
    """``rint(f((x - x0) * x_scale) * (1 / scale) + zero_point)``, all in float32.

    Source: XNNPACK, ``src/reference/unary-elementwise.cc``.
    """
    centered = (_centered(x_grid)).astype(np.float32)
    values = transform(centered * np.float32(x_grid.scale))
    scaled = values * (np.float32(1) / np.float32(grid.scale))
    rounded = np.rint(scaled + np.float32(grid.zero_point))
    return np.clip(rounded, *grid.limits).astype(grid.dtype)


def of_tflite(
    transform: Callable[[np.ndarray], np.ndarray], x_grid: Grid, grid: Grid
) -> Table:
    """``round(f(x_scale * (x - x0)) * (1 / scale)) + zero_point``, all in float32.

    Halves are rounded away from zero. int16 is interpolated (`interpolated.table`).

    Source: TFLite, ``LUTPopulateInt8`` in ``kernels/internal/common.h``.
    """
    if x_grid.dtype == "int16":
        scales = np.float32(x_grid.scale), np.float32(grid.scale)
        entries = interpolated.table(transform, scales[0], x_grid.zero_point, scales[1])
        low, high = x_grid.limits
        return interpolated.in_numpy(entries, np.arange(low, high + 1)).astype(
            grid.dtype
        )
    centered = (_centered(x_grid)).astype(np.float32)
    values = transform(np.float32(x_grid.scale) * centered)
    with np.errstate(over="ignore"):
        scaled = values * (np.float32(1) / np.float32(grid.scale))
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return np.clip(rounded + np.float32(grid.zero_point), *grid.limits).astype(
        grid.dtype
    )


def _centered(x_grid: Grid) -> np.ndarray:
    """All integers of a grid minus the zero point, int64."""
    low, high = x_grid.limits
    return np.arange(low, high + 1) - x_grid.zero_point


def _inverse_root(grid: Grid) -> Callable[[np.ndarray], np.ndarray]:
    largest = np.float32(grid.limits[1]) * np.float32(grid.scale)

    def transform(x: np.ndarray) -> np.ndarray:
        roots = np.sqrt(np.where(x > 0, x, np.float32(1)))
        return np.where(x > 0, np.float32(1) / roots, largest)

    return transform


def _table(results: np.ndarray, grid: Grid) -> Table:
    return np.clip(results + grid.zero_point, *grid.limits).astype(grid.dtype)


def _in_float64(
    function: Callable[[np.ndarray], np.ndarray],
) -> Callable[[np.ndarray], np.ndarray]:
    """Wraps a function of float32 to compute in float64 and round once."""

    def rounded(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return function(x.astype(np.float64)).astype(np.float32)

    return rounded


def _tanh(x: np.ndarray) -> np.ndarray:
    """tanh of float32, computed from expm1 as C libraries do, for equal bits."""
    one, two = np.float32(1), np.float32(2)
    twice = two * np.minimum(np.abs(x), np.float32(22))
    power = _in_float64(np.expm1)(np.where(twice >= two, twice, -twice))
    magnitude = np.where(
        twice >= two, one - two / (power + two), -power / (power + two)
    )
    return np.copysign(magnitude, x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    exponential = np.exp(np.clip(x, -100, 100))
    return exponential / (1 + exponential)


def _sigmoid_of_float32(x: np.ndarray) -> np.ndarray:
    exponential = _in_float64(np.exp)(-np.maximum(x, np.float32(-88)))
    return np.float32(1) / (np.float32(1) + exponential)


def _scaled(x: np.ndarray, x_grid: Grid, grid: Grid) -> np.ndarray:
    ratio = np.float32(x_grid.scale) / np.float32(grid.scale)
    return fixed_point.scaled(x, ratio)


def _short_multiplier(real: np.floating) -> tuple[int, int]:
    """A 16-bit multiplier and its shift."""
    multiplier, shift = fixed_point.quantized_multiplier(float(real))
    return min((int(multiplier) + 2**15) >> 16, 2**15 - 1), int(shift)


def _short_product(x: np.ndarray, y: int) -> np.ndarray:
    """``floor(x * y / 2**15 + 1 / 2)`` for numbers of int16."""
    product = x * y
    nudged = product + np.where(product >= 0, 2**14, 1 - 2**14)
    return np.sign(nudged) * (np.abs(nudged) >> 15)


def _short_saturated(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -(2**15), 2**15 - 1)

"""Functions of int16, by interpolation in small tables."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.edge.grid import Grid

_STEPS = 512

# Indices at which TFLite's table of sigmoid(i / 24) is one more than correct rounding.
_ONE_MORE = (
    *(4, 8, 12, 14, 15, 16, 17, 19, 20, 21, 22, 25, 27, 28, 29, 30, 31, 33, 34, 35, 37),
    *(39, 40, 41, 43, 44, 45, 46, 49, 50, 54, 62, 63, 64, 66, 82, 86, 93, 100, 103),
    *(112, 116, 135, 255),
)


def table(
    transform: Callable[[np.ndarray], np.ndarray],
    x_scale: np.floating,
    x_zero_point: int,
    scale: np.floating,
) -> np.ndarray:
    """Tabulates a function at 513 integers, 128 apart, for `interpolate`.

    Each entry is shifted by half the error of the interpolation at the middle of the
    interval. Computes in the dtype of the scales.

    Source: TFLite, ``LUTPopulateInt16`` in ``kernels/internal/common.h``.

    Args:
        transform: the function.
        x_scale: scale of the function's argument.
        x_zero_point: zero point of the function's argument.
        scale: scale of the result, which has zero point 0.

    Returns:
        int64, shape (513,).
    """
    dtype = np.asarray(x_scale).dtype.type
    first = x_scale * dtype(-32768 - x_zero_point)
    last = x_scale * dtype(32767 - x_zero_point)
    step = (last - first) / dtype(_STEPS)
    inverse = dtype(65536) / (scale * dtype(32767) - scale * dtype(-32768))
    places = first + np.arange(_STEPS, dtype=dtype) * step
    nexts = first + np.arange(1, _STEPS + 1, dtype=dtype) * step
    samples = _rounded(transform(places) * inverse)
    middles = _rounded(transform(places + step / dtype(2)) * inverse)
    interpolated = _rounded((transform(nexts) * inverse + samples) / dtype(2))
    biases = _rounded((interpolated - middles) / dtype(2))
    end = _rounded(transform(np.asarray([last], dtype)) * inverse)
    entries = np.concatenate([samples - biases, end])
    return np.clip(entries, -32768, 32767).astype(np.int64)


def interpolate(entries: np.ndarray, x: jax.Array) -> jax.Array:
    """Interpolates a `table` at integers.

    Source: TFLite, ``LUTLookup`` in ``kernels/internal/common.h``.

    Args:
        entries: shape (513,).
        x: int32, in the range of int16.

    Returns:
        int32.
    """
    bases = jnp.asarray(entries[:-1], jnp.int32)[256 + (x >> 7)]
    slopes = jnp.asarray(np.diff(entries).astype(np.int16), jnp.int32)[256 + (x >> 7)]
    return bases + ((slopes * (x & 127) + 64) >> 7)


def in_numpy(entries: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`interpolate` for constants, in NumPy."""
    slopes = np.diff(entries).astype(np.int16).astype(np.int64)[256 + (x >> 7)]
    return entries[256 + (x >> 7)] + ((slopes * (x & 127) + 64) >> 7)


def tanh(x_grid: Grid) -> np.ndarray:
    """TANH of every int16, on the scale 2**-15, computed from the sigmoid function.

    Source: TFLite, ``reference/integer_ops/tanh.h`` and ``TanhPrepare``.

    Returns:
        int64, shape (65536,).
    """
    x = _argument(x_grid)
    high, low = np.abs(x) >> 8, np.abs(x) & 255
    left, right = _sigmoid_at(high)
    value = np.where(high >= 255, 0xFFFF << 8, (left << 8) + low * (right - left))
    centered = value - 2**23
    return (np.where(x >= 0, centered + 128, 127 - centered)) >> 8


def logistic(x_grid: Grid) -> np.ndarray:
    """LOGISTIC of every int16, on the scale 2**-15.

    Source: TFLite, ``reference/integer_ops/logistic.h`` and ``SigmoidPrepare``.

    Returns:
        int64, shape (65536,).
    """
    x = _argument(x_grid)
    high, low = np.abs(x) >> 9, np.abs(x) & 511
    left, right = _sigmoid_at(high)
    value = np.where(high >= 255, 0x7FFF << 10, (left << 9) + low * (right - left))
    return np.where(x >= 0, value + 2**9, 2**25 - value + 2**9 - 1) >> 10


def _argument(x_grid: Grid) -> np.ndarray:
    """Every int16 in units of 1 / (3 * 4096)."""
    scale = np.float32(x_grid.scale)
    multiplier, shift = np.float64(scale) * 4096.0 * 3.0, 0
    if scale in (np.float32(2.0**-12), np.float32(2.0**-11)):
        multiplier = np.round(multiplier)
    else:
        while multiplier <= 32767.0 / 2.0 and shift <= 30:
            multiplier, shift = multiplier * 2.0, shift + 1
    half = 1 << (shift - 1) if shift else 0
    return (np.arange(-32768, 32768) * int(multiplier) + half) >> shift


def _sigmoid_at(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries ``index`` and ``index + 1`` of the 16-bit table of sigmoid(i / 24)."""
    values = 65536 / (1 + np.exp(-np.arange(256) / 24))
    entries = np.floor(values + 0.5).astype(np.int64)
    entries[list(_ONE_MORE)] += 1
    index = np.minimum(index, 254)
    return entries[index], entries[index + 1]


def _rounded(x: np.ndarray) -> np.ndarray:
    """Rounds to nearest, halves away from zero, in the dtype of x."""
    return np.trunc(x + np.copysign(x.dtype.type(0.5), x))

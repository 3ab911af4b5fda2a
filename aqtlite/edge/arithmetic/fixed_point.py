"""Products of int32 with fixed-point numbers, with the results of 64-bit integers.

JAX has no 64-bit integers by default, so each product is held in two 32-bit words.
Products of constants, such as the entries of tables, are computed in NumPy with 64-bit
integers."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Integers = jax.Array | np.ndarray
"""int32, concrete or traced."""

Rounding = Literal["once", "upward", "away", "eights"]
"""Rounding of a product, as `rounded_once`, `rounded_upward`, `rounded_away` or
`rounded_in_eights`."""


def namespace(*numbers: Any) -> ModuleType:
    """NumPy if all numbers are NumPy's, `jax.numpy` if one is a JAX array or tracer."""
    is_computed = any(isinstance(number, jax.Array) for number in numbers)
    return jnp if is_computed else np


def quantized_multiplier(
    real: np.ndarray | np.floating | float,
) -> tuple[np.ndarray, np.ndarray]:
    """Decomposes a real number into ``multiplier * 2**(shift - 31)``.

    Source: ``QuantizeMultiplier`` of TFLite, ``kernels/internal/quantization_util.cc``.

    Args:
        real: float64, positive.

    Returns:
        The multipliers, int32 from 2**30 to 2**31 - 1, and the shifts, int32.

    >>> quantized_multiplier(0.75)
    (array(1610612736, dtype=int32), array(0, dtype=int32))
    """
    mantissa, shift = np.frexp(np.asarray(real, np.float64))
    fixed = np.floor(mantissa * 2.0**31 + 0.5).astype(np.int64)
    carries = fixed == 2**31
    fixed, shift = np.where(carries, fixed // 2, fixed), shift + carries
    vanishes = shift < -31
    return (
        np.where(vanishes, 0, fixed).astype(np.int32),
        np.where(vanishes, 0, shift).astype(np.int32),
    )


def where(
    condition: Any, first: Callable[[], jax.Array], second: Callable[[], jax.Array]
) -> jax.Array:
    """``first()`` if a condition holds, otherwise ``second()``.

    Args:
        condition: bool scalar. If it is concrete, only one of the two is computed.
        first: integers.
        second: integers of the same dtype and shape.
    """
    if namespace(condition) is np:
        return first() if condition else second()
    return jnp.where(condition, first(), second())


def multiply(
    x: jax.Array, multiplier: Integers, shift: Integers, rounding: Rounding
) -> jax.Array:
    """``x * multiplier * 2**(shift - 31)``, rounded.

    Args:
        x: int32.
        multiplier: int32, not negative; broadcasts to x.
        shift: int32 from -31 to 30; broadcasts to x.
        rounding: rounding of the product.
    """
    run = {
        "once": rounded_once,
        "upward": rounded_upward,
        "away": rounded_away,
        "eights": rounded_in_eights,
    }
    return run[rounding](x, multiplier, shift)


def rounded_once(x: jax.Array, multiplier: Integers, shift: Integers) -> jax.Array:
    """``floor(x * multiplier / 2**(31 - shift) + 1 / 2)``.

    Source: ``MultiplyByQuantizedMultiplier`` of TFLite with TFLITE_SINGLE_ROUNDING,
    ``kernels/internal/common.cc``.
    """
    return _shifted(product(x, multiplier), 31 - shift)


def rounded_upward(x: jax.Array, multiplier: Integers, shift: Integers) -> jax.Array:
    """``floor(floor(x * 2**left * multiplier / 2**31 + 1 / 2) / 2**right + 1 / 2)``.

    ``left`` is ``max(shift, 0)``, and ``right`` is ``max(-shift, 0)``.

    Source: ruy, which TFLite's optimized kernels call, as measured.
    """
    left, right = _left_and_right(shift)
    high = _shifted(product(x << left, multiplier), np.asarray(31))
    # The sum does not overflow: numbers that are shifted right are far below 2**31.
    return (high + _half(right)) >> right


def rounded_away(x: jax.Array, multiplier: Integers, shift: Integers) -> jax.Array:
    """Like `rounded_upward`, but the second rounding takes halves away from zero.

    Source: ``MultiplyByQuantizedMultiplier`` of TFLite,
    ``kernels/internal/common.cc``, with gemmlowp's
    ``SaturatingRoundingDoublingHighMul`` and ``RoundingDivideByPOT``.
    """
    left, right = _left_and_right(shift)
    high = _shifted(product(x << left, multiplier), np.asarray(31))
    return (high + _half(right) - ((high < 0) & (right > 0))) >> right


def rounded_in_eights(x: jax.Array, multiplier: Integers, shift: Integers) -> jax.Array:
    """`rounded_upward` for all full groups of 8 channels, `rounded_away` for the rest.

    Source: TFLite's optimized depthwise convolution, as measured.
    """
    channels = x.shape[-1]
    return jnp.where(
        np.arange(channels) < channels // 8 * 8,
        rounded_upward(x, multiplier, shift),
        rounded_away(x, multiplier, shift),
    )


def rounded_short(
    high: jax.Array, low: jax.Array, multiplier: np.ndarray, shift: np.ndarray
) -> jax.Array:
    """Like `rounded_once`, for ``256 * high + low``, with a multiplier of 16 bits.

    Source: ``MultiplyByQuantizedMultiplier`` of TFLite for 64-bit sums (of products of
    int16), ``kernels/internal/common.cc``.

    Args:
        high: int32.
        low: int32.
        multiplier: int32, not negative; broadcasts to both.
        shift: int32 from -31 to 7; broadcasts to both.
    """
    wide = np.asarray(multiplier, np.int64)
    short = np.minimum((wide + 2**15) >> 16, 0x7FFF).astype(np.int32)
    upper, lower = product(high, short)
    lifted = (upper << 8) | (lower >> 24).astype(jnp.int32), lower << 8
    upper, lower = product(low, short)
    sums = lifted[1] + lower
    carry = (sums < lower).astype(jnp.int32)
    return _shifted((lifted[0] + upper + carry, sums), 15 - np.asarray(shift))


def _left_and_right(shift: Integers) -> tuple[Integers, Integers]:
    xp = namespace(shift)
    return xp.maximum(shift, 0), xp.maximum(-shift, 0)


def _half(right: Integers) -> Integers:
    """Half of the last place after a right shift; 0 without a shift."""
    return (right > 0) * (np.int32(1) << namespace(right).maximum(right - 1, 0))


def product(x: jax.Array, y: Integers) -> tuple[jax.Array, jax.Array]:
    """The high word, int32, and the low word, uint32, of ``x * y``.

    Args:
        x: int32.
        y: int32, not negative; broadcasts to x.
    """
    x, factor = x.astype(jnp.int32), jnp.asarray(y, jnp.int32)
    x_high, x_low = x >> 16, x & 0xFFFF
    y_high, y_low = factor >> 16, factor & 0xFFFF
    low = x_low.astype(jnp.uint32) * y_low.astype(jnp.uint32)
    # Neither sum overflows: a product of 16-bit halves leaves room for 16 more bits.
    middle = x_high * y_low + (low >> 16).astype(jnp.int32)
    carry = x_low * y_high + (middle & 0xFFFF)
    high = x_high * y_high + (middle >> 16) + (carry >> 16)
    return high, (carry.astype(jnp.uint32) << 16) | (low & 0xFFFF)


def _shifted(words: tuple[jax.Array, jax.Array], amount: Integers) -> jax.Array:
    """``floor(x / 2**amount + 1 / 2)`` of a 64-bit x, for amounts from 1 to 62."""
    high, low = words
    xp = namespace(amount)
    half = xp.asarray(amount, np.int32) - 1
    low_half = xp.where(half < 32, np.uint32(1) << xp.clip(half, 0, 31), 0)
    high_half = xp.where(half >= 32, np.int32(1) << xp.clip(half - 32, 0, 31), 0)
    sums = low + low_half.astype(np.uint32)
    high = high + high_half.astype(np.int32) + (sums < low).astype(jnp.int32)
    # For amounts below 32, bits of the high word move into the low word.
    small = xp.clip(half + 1, 1, 31)
    joined = (high << (32 - small)).astype(jnp.uint32) | (
        sums >> small.astype(np.uint32)
    )
    large = xp.clip(half - 31, 0, 31)
    return jnp.where(
        half < 31, lax.bitcast_convert_type(joined, jnp.int32), high >> large
    )


# --- Constants ------------------------------------------------------------------------


def scaled(x: np.ndarray, real: float | np.floating) -> np.ndarray:
    """``x * real`` in fixed point, rounded like `rounded_away`.

    Args:
        x: int64, in the range of int32.
        real: positive.
    """
    multiplier, shift = quantized_multiplier(float(real))
    return multiplied(x, int(multiplier), int(shift))


def multiplied(x: np.ndarray, multiplier: int, shift: int) -> np.ndarray:
    """``x * multiplier * 2**(shift - 31)``, rounded like `rounded_away`."""
    high = high_product(x << max(shift, 0), np.int64(multiplier))
    return shifted_away(high, np.asarray(max(-shift, 0)))


def high_product(x: np.ndarray, y: np.ndarray | np.integer) -> np.ndarray:
    """``floor(x * y / 2**31 + 1 / 2)`` for numbers of int32, held in int64."""
    product = x * y
    nudged = product + np.where(product >= 0, 2**30, 1 - 2**30)
    return np.sign(nudged) * (np.abs(nudged) >> 31)


def shifted_away(x: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """``x / 2**amount`` for int32, rounded to nearest, halves away from zero.

    For amounts above 31, gives what gemmlowp's ``RoundingDivideByPOT`` gives on x86,
    which shifts by the low five bits of the amount; this is not the quotient.
    """
    mask = np.where(amount > 31, -1, (np.int64(1) << np.minimum(amount, 31)) - 1)
    rounds_up = (x & mask) > (mask >> 1) + (x < 0)
    return (x >> (amount & 31)) + rounds_up

"""Numbers as sums of int8 digits, for int8 contractions.

A number of several digits is ``sum_i 256^i digit_i`` with digits from -128 to 127. The
digits of an operand are stacked along a new axis, one contraction sums the products of
each digit, and the sums are combined.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact, reduction

LARGEST = 128
"""The largest magnitude of a digit."""

LARGEST_OF_TWO = 2**15 - 2**7 - 1
"""The largest magnitude of two digits; they hold -2**15 as well."""

LARGEST_OF_THREE = 2**23 - 2**15 - 2**7 - 1
"""The largest magnitude of three digits."""

BITS = 8

EXACT_SUM = 2**24
"""The largest magnitude up to which all integers are exact in float32."""


@dataclasses.dataclass(frozen=True)
class Digits:
    """An operand that is contracted as int8 digits."""

    values: jax.Array
    """Integers, or the digits of floats on a leading axis."""

    largest: int
    """Largest magnitude of the integers, or of a single digit of floats, which are
    combined only after products are summed."""

    count: int
    """Number of digits; one for int4 and int8."""

    unit: jax.Array | None = None
    """Unit of the lowest digit of floats, float32, keepdims; None for integers."""

    @classmethod
    def of_integers(cls, x: jax.Array, largest: int | None) -> "Digits":
        """Returns integers with as many digits as their largest magnitude needs.

        Args:
            x: int4, int8, int16 or int32.
            largest: largest magnitude; None for the maximum of the dtype.
        """
        info = jnp.iinfo(x.dtype)
        largest = int(info.max) if largest is None else largest
        count = 2 if largest <= LARGEST_OF_TWO else 3
        return cls(x, largest, 1 if info.bits <= 8 else count)

    @classmethod
    def of_floats(
        cls, x: jax.Array, axes: tuple[int, ...], out_dtype: np.dtype
    ) -> "Digits":
        """Returns floats as three digits, two if they and the result have 16 bits.

        Args:
            x: floating.
            axes: axes along which elements share a unit.
            out_dtype: dtype of the result of the contraction.
        """
        count = count_of_floats(x.dtype, out_dtype)
        values, unit = of_floats(x, axes, count)
        return cls(values, LARGEST, count, unit)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand."""
        return self.values.shape if self.unit is None else self.values.shape[1:]

    @property
    def is_split(self) -> bool:
        """Whether there are several digits."""
        return self.count > 1

    @property
    def largest_digit(self) -> int:
        return LARGEST if self.is_split else self.largest

    def split(self) -> jax.Array:
        """The digits, int4 or int8: on a leading axis if there are several."""
        if self.unit is not None or not self.is_split:
            return self.values
        return of_integers(self.values, self.count)

    def cut(self, function: Callable[[jax.Array], jax.Array]) -> "Digits":
        """Applies a function that cuts a part from the operand."""
        each = function if self.unit is None else jax.vmap(function)
        return dataclasses.replace(self, values=each(self.values))


def of_integers(x: jax.Array, count: int) -> jax.Array:
    """Returns the digits of int16 or int32 on a new leading axis, lowest first.

    Two digits hold magnitudes up to `LARGEST_OF_TWO`, three to `LARGEST_OF_THREE`.
    """
    x = x.astype(jnp.int32)
    digits = []
    for _ in range(count - 1):
        low = (x << (32 - BITS)) >> (32 - BITS)
        digits.append(low)
        x = (x - low) >> BITS
    return jnp.stack([*digits, x]).astype(jnp.int8)


def count_of_floats(dtype: np.dtype, out_dtype: np.dtype) -> int:
    """Returns the number of digits: two if floats and the result have 16 bits."""
    is_half = jnp.finfo(dtype).bits == jnp.finfo(out_dtype).bits == 16
    return 2 if is_half else 3


def of_floats(
    x: jax.Array, axes: tuple[int, ...], count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the digits of floats in fixed point, and the unit of the lowest digit.

    Units are powers of two, so that the only error is rounding, at most half a unit:
    2^-23 with three digits, 2^-15 with two, of the power of two above the largest
    magnitude that shares the unit.

    Args:
        x: floating.
        axes: axes along which elements share a unit.
        count: number of digits, two or three.

    Returns:
        int8 with a new leading axis, and float32 with size 1 along `axes`. The unit is
        NaN where an element is not finite.
    """
    x = exact.float32(x)
    bound = reduction.largest_magnitude(x, axes)
    # The top digit has a sign, six bits, and room for a carry.
    fraction_bits = BITS * count - 2
    # The exponents of the power of two at or above the bound, and of the unit, which
    # is a normal number with a normal reciprocal.
    bits = lax.bitcast_convert_type(bound, jnp.int32)
    exponent = (bits + (1 << 23) - 1) >> 23
    exponent = jnp.clip(exponent - fraction_bits, 1, 253)
    unit = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    reciprocal = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    fixed = exact.nearest_integer(x * reciprocal)
    is_finite = bound <= jnp.finfo(jnp.float32).max
    return of_integers(fixed, count), jnp.where(is_finite, unit, jnp.nan)


def rounded(sums: Sequence[jax.Array], largest: int | None) -> jax.Array:
    """Combines int32 sums of products of each digit, lowest first, to float32.

    The highest sum takes over what the one below has above 8 bits, so that a form that
    multiplies both digits as one number has an equal result. It has in any case where
    the sums are exact in float32.

    Args:
        sums: a sum for each digit of floats.
        largest: largest magnitude of the sums; None if it is not known.
    """
    *low, below, highest = sums
    if largest is None or largest > EXACT_SUM:
        highest, below = highest + (below >> BITS), below & ((1 << BITS) - 1)
    return combine([one.astype(jnp.float32) for one in (*low, below, highest)])


def combine(sums: Sequence[jax.Array]) -> jax.Array:
    """Combines the sums of products of each digit, lowest first.

    int32 sums are combined in int32, modulo 2^32; float32 sums in float32, where a
    product with a power of 256 is exact, so that a fused multiply-add changes nothing.
    """
    total = sums[-1]
    for part in reversed(sums[:-1]):
        total = total * np.asarray(1 << BITS, total.dtype) + part
    return total

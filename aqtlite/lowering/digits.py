"""Numbers as sums of int8 digits, so that int8 contractions contract them.

A number of several digits is ``sum_i 256^i digit_i`` with digits from -128 to 127. Its
digits are stacked along a new axis of an operand, one contraction sums the products of
each, and the sums are put together again.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact, reduction
from aqtlite.shapes import dimension_numbers as dn

LARGEST = 128
"""The largest magnitude of a digit."""

LARGEST_OF_TWO = 2**15 - 2**7 - 1
"""The largest magnitude of two digits; they hold -2**15 as well."""

LARGEST_OF_THREE = 2**23 - 2**15 - 2**7 - 1
"""The largest magnitude of three digits."""

Magnitudes = tuple[int | None, int | None]
"""The largest magnitudes in lhs and rhs; None for that of the dtype."""

_BITS = 8


def magnitudes(lhs: jax.Array, rhs: jax.Array, largest: Magnitudes) -> tuple[int, int]:
    """The largest magnitudes of integers, where unknown those of their dtypes."""
    lhs_largest, rhs_largest = (
        int(jnp.iinfo(x.dtype).max) if one is None else one
        for x, one in zip((lhs, rhs), largest, strict=True)
    )
    return lhs_largest, rhs_largest


def count_for(floats: jax.Array, out_dtype: np.dtype) -> int:
    """How many digits of floats a contraction with integers takes.

    Two where both they and the result are of 16 bits, otherwise three.
    """
    is_half = jnp.finfo(floats.dtype).bits == jnp.finfo(out_dtype).bits == 16
    return 2 if is_half else 3


def of_integers(x: jax.Array, count: int) -> jax.Array:
    """The digits of int16 or int32, on a new leading axis, the lowest first.

    Two digits hold magnitudes up to `LARGEST_OF_TWO`, three to `LARGEST_OF_THREE`.
    """
    x = x.astype(jnp.int32)
    digits = []
    for _ in range(count - 1):
        low = (x << (32 - _BITS)) >> (32 - _BITS)
        digits.append(low)
        x = (x - low) >> _BITS
    return jnp.stack([*digits, x]).astype(jnp.int8)


def of_floats(
    x: jax.Array, axes: tuple[int, ...], count: int
) -> tuple[jax.Array, jax.Array]:
    """The digits of floats in fixed point, and the unit of their lowest digit.

    Units are powers of two, so that an element differs from what its digits say by at
    most half a unit and by nothing else: with three digits by 2^-23, with two by 2^-15
    of the power of two above the largest magnitude that shares the unit.

    Args:
        x: floating.
        axes: the axes along which the elements share a unit.
        count: how many digits: two or three.

    Returns:
        int8 with a new leading axis, and float32 with size 1 along `axes`. The unit is
        NaN where an element is not finite.
    """
    x = exact.float32(x)
    bound = reduction.largest_magnitude(x, axes)
    # In the top digit a sign, six bits, and room for what is carried into it.
    fraction_bits = _BITS * count - 2
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


def stacked_dims(
    dims: dn.DimensionNumbers, lhs: int = 0, rhs: int = 0
) -> dn.DimensionNumbers:
    """Dimension numbers of operands with so many new leading axes."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims

    def shift(axes: dn.Axes, by: int) -> dn.Axes:
        return tuple(axis + by for axis in axes)

    return (shift(lhs_ca, lhs), shift(rhs_ca, rhs)), (
        shift(lhs_ba, lhs),
        shift(rhs_ba, rhs),
    )


def combine(sums: jax.Array, axis: int) -> jax.Array:
    """Puts together the sums of each digit's products, which lie along an axis.

    Of int32 in int32, modulo 2^32; of float32 in float32, where a product with a power
    of 256 is exact, so that no compiler finds anything to contract.
    """
    count = sums.shape[axis]
    parts = [lax.index_in_dim(sums, i, axis, keepdims=False) for i in range(count)]
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total * np.asarray(1 << _BITS, total.dtype) + part
    return total

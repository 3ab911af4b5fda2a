"""Histograms of magnitudes: counts that can be added in any order, and percentiles.

There is one bin between each pair of neighbouring floats of some mantissa bits. The
edges are thus known before the first batch. Counts saturate at 2^32 - 1.
"""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import replicated

_MANTISSA_BITS = 23  # of float32


def edges(mantissa_bits: int) -> np.ndarray:
    """The upper edges of the bins, float32; the first bin holds only zeros."""
    bins = np.arange(_number_of_bins(mantissa_bits), dtype=np.int32)
    found = (bins << (_MANTISSA_BITS - mantissa_bits)).view(np.float32)
    return np.where(np.isfinite(found), found, np.finfo(np.float32).max)


def empty(shape: tuple[int, ...], mantissa_bits: int) -> jax.Array:
    """Counts of no elements, uint32 of shape ``(bins, *shape)``."""
    return jnp.zeros((_number_of_bins(mantissa_bits), *shape), jnp.uint32)


def add(
    counts: jax.Array,
    x: jax.Array,
    axes: Axes,
    mantissa_bits: int,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Counts the magnitudes of an array along axes, in addition to earlier ones.

    NaN and infinity are in the last bin, which holds nothing else.

    Args:
        counts: earlier counts.
        x: float32.
        axes: axes of the elements counted together.
        mantissa_bits: as in `edges`.
        mask: bool of the shape of x, True for elements to count; None for all.
    """
    bins = len(counts)
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    shift = _MANTISSA_BITS - mantissa_bits
    found = jnp.where(jnp.isfinite(x), (bits + ((1 << shift) - 1)) >> shift, -1)
    found = jnp.where(found < 0, bins - 1, found)
    if mask is not None:
        found = jnp.where(mask, found, bins)  # In no bin.
    found = replicated(found)
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    sizes = (math.prod(x.shape[axis] for axis in part) for part in (kept, axes))
    rows = found.transpose(*kept, *axes).reshape(tuple(sizes))
    # Indices beyond the length are dropped.
    new = jax.vmap(lambda row: jnp.bincount(row, length=bins))(rows)
    return merge(counts, new.astype(jnp.uint32).T.reshape(counts.shape))


def merge(counts: jax.Array, other: jax.Array) -> jax.Array:
    """The counts of both histograms."""
    total = counts + other
    return jnp.where(total < counts, np.uint32(2**32 - 1), total)


def percentile(counts: jax.Array, percentage: float, mantissa_bits: int) -> jax.Array:
    """The upper edge of the bin that holds a percentile; NaN with NaN or infinity.

    The percentage is taken in exact decimal, and counts are summed exactly.
    """
    low, high = _cumulative_sums(counts)
    is_reached = is_percentage((low, high), (low[-1:], high[-1:]), percentage)
    first = jnp.argmax(is_reached, axis=0).astype(jnp.int32)
    shift = _MANTISSA_BITS - mantissa_bits
    edge = lax.bitcast_convert_type(first << shift, jnp.float32)
    edge = jnp.minimum(edge, jnp.finfo(jnp.float32).max)
    return jnp.where(counts[-1] > 0, jnp.float32(np.nan), edge)


Words = tuple[jax.Array, jax.Array]
"""Low and high words of a number, uint32."""


def is_percentage(part: Words, whole: Words, percentage: float) -> jax.Array:
    """Whether a number is at least a percentage, in exact decimal, of another one."""
    share = fractions.Fraction(str(percentage)) / 100
    digits = -(-share.denominator.bit_length() // 16)
    return _is_at_least(
        _multiple(part, share.denominator, digits),
        _multiple(whole, share.numerator, digits),
    )


def _number_of_bins(mantissa_bits: int) -> int:
    return 1 << (8 + mantissa_bits)


def _cumulative_sums(counts: jax.Array) -> Words:
    """Exact cumulative sums along the first axis."""
    low = jnp.cumsum(counts, axis=0, dtype=jnp.uint32)
    # A step wraps around at most once; the sum is then smaller than the added term.
    high = jnp.cumsum(low < counts, axis=0, dtype=jnp.uint32)
    return low, high


def _multiple(words: Words, factor: int, digits: int) -> list[jax.Array]:
    """A product, in 16-bit digits, the lowest first.

    Args:
        words: the number.
        factor: factor, not negative.
        digits: number of 16-bit digits of the factor.
    """
    mask = np.uint32(0xFFFF)
    number = [digit for word in words for digit in (word & mask, word >> 16)]
    product = [jnp.zeros_like(number[0])] * (len(number) + digits)
    for i in range(digits):
        carry = jnp.zeros_like(number[0])
        by = np.uint32((factor >> (16 * i)) & 0xFFFF)
        for j, digit in enumerate(number):
            # At most 2^32 - 1.
            term = digit * by + product[i + j] + carry
            product[i + j], carry = term & mask, term >> 16
        product[i + len(number)] = carry
    return product


def _is_at_least(one: list[jax.Array], other: list[jax.Array]) -> jax.Array:
    """Compares two numbers given as digits, the lowest first."""
    is_at_least = jnp.ones_like(one[0], dtype=bool)
    for a, b in zip(one, other, strict=True):
        is_at_least = (a > b) | ((a == b) & is_at_least)
    return is_at_least

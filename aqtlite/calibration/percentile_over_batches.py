"""Calibration by a percentile of the magnitudes of all batches."""

import dataclasses
import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import base
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import replicated

_MANTISSA_BITS = 23  # of float32


@dataclasses.dataclass(frozen=True)
class PercentileOverBatches(base.Calibration):
    """The magnitude that a percentage of the elements of all batches does not exceed.

    Magnitudes are counted in a histogram whose bins lie between two neighbouring floats
    of `mantissa_bits`, so that its edges are known before the first batch: counts of
    batches add up, in any order and any split of them. The bound is the upper edge of
    the bin that the percentile lies in, and exceeds it by a factor of at most
    ``1 + 2^-mantissa_bits``. NVIDIA's quantization of activations calibrates so at 99.9
    percent and above (Wu et al. 2020, arXiv:2004.09602).

    On a mesh with explicit axes, every device counts the whole batch.

    A NaN or an infinity makes the bound NaN. A bin counts up to 2^32 - 1 elements, and
    stays there.

    Raises:
        TypeError: if a field is not of the type declared.
        ValueError: if `percentage` is not above 0 and at most 100, or `mantissa_bits`
            not from 1 to 10.
    """

    percentage: float
    """How many percent of the elements the grid reaches; what lies beyond is clipped.
    Set ``IntSymmetric(clip_gradient=True)`` below 100."""

    mantissa_bits: int = 5
    """Of the edges. There are ``2^(8 + mantissa_bits)`` bins, of 4 bytes each."""

    def __post_init__(self) -> None:
        bits = fields.integer(1, 10)
        fields.check(self, percentage=fields.percentage, mantissa_bits=bits)

    @property
    def has_state(self) -> bool:
        return True

    @property
    def _bins(self) -> int:
        return 1 << (8 + self.mantissa_bits)

    def edges(self) -> np.ndarray:
        """The upper edges of the bins, float32; the first one is that of zero alone."""
        shift = _MANTISSA_BITS - self.mantissa_bits
        edges = (np.arange(self._bins, dtype=np.int32) << shift).view(np.float32)
        return np.where(np.isfinite(edges), edges, np.finfo(np.float32).max)

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> base.State:
        del grid
        return {"counts": jnp.zeros((self._bins, *shape), jnp.uint32)}

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        del grid
        # Without a sign, floats are in the order of their bits. What is at most an edge
        # belongs below it.
        bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        shift = _MANTISSA_BITS - self.mantissa_bits
        bins = jnp.where(jnp.isfinite(x), (bits + ((1 << shift) - 1)) >> shift, -1)
        bins = jnp.where(bins < 0, self._bins - 1, bins)
        bins = replicated(bins)
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        sizes = (math.prod(x.shape[axis] for axis in part) for part in (kept, axes))
        rows = bins.transpose(*kept, *axes).reshape(tuple(sizes))
        counts = jax.vmap(lambda row: jnp.bincount(row, length=self._bins))(rows)
        before = statistics.state["counts"]
        counts = counts.astype(jnp.uint32).T.reshape(before.shape)
        return {"counts": _saturating_sum(before, counts)}

    def merge(
        self, statistics: base.Statistics, other: base.Statistics, grid: Numerics
    ) -> base.State:
        del grid
        counts = statistics.state["counts"], other.state["counts"]
        return {"counts": _saturating_sum(*counts)}

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, statistics: Any
    ) -> base.Range:
        del x, axes, grid
        counts = statistics.state["counts"]
        low, high = _cumulative_sums(counts)
        # In decimal, as `Percentile` has it: below >= share * total.
        share = fractions.Fraction(str(self.percentage)) / 100
        digits = -(-share.denominator.bit_length() // 16)
        is_reached = _is_at_least(
            _multiple((low, high), share.denominator, digits),
            _multiple((low[-1:], high[-1:]), share.numerator, digits),
        )
        first = jnp.argmax(is_reached, axis=0)
        shift = _MANTISSA_BITS - self.mantissa_bits
        edge = lax.bitcast_convert_type(first.astype(jnp.int32) << shift, jnp.float32)
        # Above the last edge but infinity there are finite values.
        edge = jnp.minimum(edge, jnp.finfo(jnp.float32).max)
        return base.Range(jnp.where(counts[-1] > 0, jnp.float32(np.nan), edge))


def _saturating_sum(before: jax.Array, counts: jax.Array) -> jax.Array:
    # Where a sum wraps around, it is smaller than either term.
    total = before + counts
    return jnp.where(total < before, np.uint32(2**32 - 1), total)


def _cumulative_sums(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact sums along the first axis, in a low and a high word."""
    low = jnp.cumsum(counts, axis=0, dtype=jnp.uint32)
    # A step wraps around at most once, and the sum is then smaller than its term.
    high = jnp.cumsum(low < counts, axis=0, dtype=jnp.uint32)
    return low, high


def _multiple(
    words: tuple[jax.Array, jax.Array], factor: int, digits: int
) -> list[jax.Array]:
    """A product in digits of 16 bits, the lowest first.

    Args:
        words: the low and the high word of a number.
        factor: not negative.
        digits: digits of the factor, of 16 bits.
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
    """Compares two numbers in digits, the lowest first."""
    is_at_least = jnp.ones_like(one[0], dtype=bool)
    for a, b in zip(one, other, strict=True):
        is_at_least = (a > b) | ((a == b) & is_at_least)
    return is_at_least

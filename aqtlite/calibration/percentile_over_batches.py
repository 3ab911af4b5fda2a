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

    Magnitudes are counted in a histogram with one bin between each pair of neighbouring
    floats of `mantissa_bits`. The edges are thus known before the first batch, and
    counts can be added in any order and for any split into batches. The bound is the
    upper edge of the bin that contains the percentile, and exceeds the percentile by a
    factor of at most ``1 + 2^-mantissa_bits``. NVIDIA calibrates activations in this
    way at 99.9 percent and above (Wu et al. 2020, arXiv:2004.09602).

    On a mesh with explicit axes, every device counts the whole batch.

    A NaN or infinity makes the bound NaN. Bin counts saturate at 2^32 - 1.

    Raises:
        TypeError: if a field is not of the type declared.
        ValueError: if `percentage` is not above 0 and at most 100, or `mantissa_bits`
            not from 1 to 10.
    """

    percentage: float
    """Percentage of the elements that the grid covers; the others are clipped. Below
    100, set ``IntSymmetric(clip_gradient=True)``."""

    mantissa_bits: int = 5
    """Mantissa bits of the bin edges: ``2^(8 + mantissa_bits)`` bins, 4 bytes each."""

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
        """The upper edges of the bins, float32; the first bin holds only zeros."""
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
        # Non-negative floats are ordered like their bits. A bin includes its upper
        # edge.
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
        # In exact decimal, as in `Percentile`: below >= share * total.
        share = fractions.Fraction(str(self.percentage)) / 100
        digits = -(-share.denominator.bit_length() // 16)
        is_reached = _is_at_least(
            _multiple((low, high), share.denominator, digits),
            _multiple((low[-1:], high[-1:]), share.numerator, digits),
        )
        first = jnp.argmax(is_reached, axis=0)
        shift = _MANTISSA_BITS - self.mantissa_bits
        edge = lax.bitcast_convert_type(first.astype(jnp.int32) << shift, jnp.float32)
        # The last edge would be infinity, but the bin also holds finite values.
        edge = jnp.minimum(edge, jnp.finfo(jnp.float32).max)
        return base.Range(jnp.where(counts[-1] > 0, jnp.float32(np.nan), edge))


def _saturating_sum(before: jax.Array, counts: jax.Array) -> jax.Array:
    # A sum that wraps around is smaller than either term.
    total = before + counts
    return jnp.where(total < before, np.uint32(2**32 - 1), total)


def _cumulative_sums(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact cumulative sums along the first axis, as low and high words."""
    low = jnp.cumsum(counts, axis=0, dtype=jnp.uint32)
    # A step wraps around at most once; the sum is then smaller than the added term.
    high = jnp.cumsum(low < counts, axis=0, dtype=jnp.uint32)
    return low, high


def _multiple(
    words: tuple[jax.Array, jax.Array], factor: int, digits: int
) -> list[jax.Array]:
    """A product, in 16-bit digits, the lowest first.

    Args:
        words: low and high words of a number.
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

"""Calibration by a percentile of the magnitudes."""

import dataclasses
import fractions
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import base, histogram, min_max, power_mean
from aqtlite.lowering import reduction
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class Percentile(base.Calibration):
    """The magnitude, or range, that a percentage of the elements does not exceed.

    ``bound = |x|_(k)``, the k-th smallest magnitude along the shared axes, with
    ``k = ceil(percentage / 100 * n)`` for n elements: an actual magnitude, without
    interpolation (NumPy's method ``"inverted_cdf"``). McKinstry et al. (2018,
    arXiv:1809.04191) calibrate activations at 99.9 percent and above.

    For a grid with a zero point, ``high = max(x_(k), 0)`` with the k-th smallest value,
    and ``low = min(x_(n+1-k), 0)`` with the k-th largest, so the percentage holds at
    each end. This takes twice as long.

    A NaN or infinity makes the channel NaN, even if it lies beyond the percentile. If
    enough elements are zero, the bound is 0 and the scale 1.

    The k-th smallest magnitude is found bit by bit, by counting the elements below a
    threshold 31 times. Nothing is sorted, and the result is the same in every program
    and on every mesh. In training, the cost arises at every step
    (`aqtlite.errors.CostWarning`), unless `Periodic` keeps the range.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, -3.0, 2.0, 50.0], [4.0, 3.0, -2.0, 1.0]])
    >>> Percentile(75).bound(x, (1,)).tolist()
    [[3.0], [3.0]]
    >>> from aqtlite import numerics
    >>> x = jnp.array([-9.0, -2.0, -1.0, 3.0, 70.0])
    >>> high, low = Percentile(80).range(x, (0,), numerics.IntAffine(), ())
    >>> high.tolist(), low.tolist()
    ([3.0], [-2.0])

    Raises:
        ValueError: if `percentage` is not above 1 and at most 100.
        TypeError: if `percentage` is not a number.
    """

    percentage: float
    """Percentage of the elements that the grid covers; the others are clipped. Below
    100, set ``IntSymmetric(clip_gradient=True)``."""

    def __post_init__(self) -> None:
        fields.check(self, percentage=fields.percentage)

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        del state
        if grid.zero_point_range is None:
            return base.Range(self.bound(x, axes))
        # Replacing the other sign by zeros keeps the order of the values.
        above, below = min_max.both_sides(x)
        return base.Range(self.bound(above, axes), -self.bound(below, axes))

    def masked_range(
        self, x: jax.Array, mask: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Range:
        if grid.zero_point_range is None:
            return base.Range(self._masked_bound(x, mask, axes))
        above, below = (
            self._masked_bound(part, mask, axes) for part in min_max.both_sides(x)
        )
        return base.Range(above, -below)

    def _masked_bound(self, x: jax.Array, mask: jax.Array, axes: Axes) -> jax.Array:
        bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        count = power_mean.number_of(mask, axes)
        percentage = self.percentage

        def is_beyond(candidate: jax.Array) -> jax.Array:
            below = power_mean.number_of(mask & (bits < candidate), axes)
            return histogram.is_percentage(_words(below), _words(count), percentage)

        found = _largest_not_beyond(is_beyond, jnp.zeros_like(count))
        largest = reduction.largest_magnitude(x, axes)
        return jnp.where(jnp.isfinite(largest), found, jnp.float32(np.nan))

    @property
    def cost_in_training(self) -> str | None:
        return "31 passes over the array"

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        count = power_mean.count_along(x, axes)
        if count == 0:
            return reduction.largest_magnitude(x, axes)
        # In exact decimal: 99.9 percent of 1000 elements are 999, not 1000.
        share = fractions.Fraction(str(self.percentage)) / 100
        return _Smallest(tuple(axes), math.ceil(share * count))(x)


@dataclasses.dataclass(frozen=True)
class _Smallest(TargetDependent):
    """The k-th smallest magnitude over some axes."""

    axes: Axes
    k: int

    def reference(self, x: jax.Array) -> jax.Array:
        # As for a maximum, the gradient goes to all elements of that magnitude.
        magnitude = jnp.abs(x)
        is_kth = magnitude == lax.stop_gradient(self._find(x))
        total = jnp.sum(jnp.where(is_kth, magnitude, 0), axis=self.axes, keepdims=True)
        ties = jnp.sum(is_kth, axis=self.axes, keepdims=True, dtype=jnp.int32)
        return total / jnp.maximum(ties, 1).astype(jnp.float32)

    def lowered(self, target: Target, x: jax.Array) -> jax.Array:
        del target
        found = self._find(x)
        largest = reduction.largest_magnitude(x, self.axes)
        return jnp.where(jnp.isfinite(largest), found, jnp.float32(np.nan))

    def _find(self, x: jax.Array) -> jax.Array:
        """The largest float that fewer than k magnitudes lie below."""
        # Non-negative floats are ordered like their bits.
        bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

        def is_beyond(candidate: jax.Array) -> jax.Array:
            below = jnp.sum(
                bits < candidate, axis=self.axes, keepdims=True, dtype=jnp.int32
            )
            return below >= self.k

        start = jnp.zeros_like(jnp.min(bits, axis=self.axes, keepdims=True))
        return _largest_not_beyond(is_beyond, start)


def _largest_not_beyond(
    is_beyond: Callable[[jax.Array], jax.Array], start: jax.Array
) -> jax.Array:
    """The largest float that is not beyond a threshold, by its bits, the highest first.

    Args:
        is_beyond: whether floats with these bits, int32, are beyond it.
        start: zeros, int32.
    """

    def add_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (np.int32(1 << 30) >> i)
        return jnp.where(is_beyond(candidate), found, candidate)

    found = lax.fori_loop(0, 31, add_bit, start)
    return lax.bitcast_convert_type(found, jnp.float32)


def _words(count: jax.Array) -> histogram.Words:
    low = count.astype(jnp.uint32)
    return low, jnp.zeros_like(low)

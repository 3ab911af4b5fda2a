"""Calibration by a percentile of the magnitudes."""

import dataclasses
import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import base, min_max, power_mean
from aqtlite.lowering import reduction
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class Percentile(base.Calibration):
    """The magnitude, or range, that a percentage of the elements does not exceed.

    ``bound = |x|_(k)``, the k-th smallest magnitude along the shared axes, with
    ``k = ceil(percentage / 100 * n)`` of n elements: one of the magnitudes themselves,
    with nothing interpolated (NumPy's method ``"inverted_cdf"``). McKinstry et al.
    (2018, arXiv:1809.04191) calibrate activations at 99.9 percent and above.

    For a grid with a zero point, ``high = max(x_(k), 0)`` of the k-th smallest value,
    and ``low = min(x_(n+1-k), 0)`` of the k-th largest: so many percent do not lie
    above, and so many not below. It takes twice as long.

    NaN or an infinity makes its channel NaN, also where it lies beyond the percentile.
    The bound is 0, and the scale 1, where enough elements are zeros.

    The k-th smallest is found bit by bit: 31 times the elements below a threshold are
    counted. Nothing is sorted, and counts have the same result in every program and on
    every mesh. At training steps this cost deserves an `aqtlite.errors.CostWarning`;
    `Periodic` keeps the range for several.

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
        ValueError: if `percentage` is not above 0 and at most 100.
        TypeError: if it is not a number.
    """

    percentage: float
    """How many percent of the elements the grid reaches; what lies beyond is clipped.
    Set ``IntSymmetric(clip_gradient=True)`` below 100."""

    def __post_init__(self) -> None:
        fields.check(self, percentage=fields.percentage)

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        del state
        if grid.zero_point_range is None:
            return base.Range(self.bound(x, axes))
        # Zeros in place of the other sign keep the order of the values.
        above, below = min_max.both_sides(x)
        return base.Range(self.bound(above, axes), -self.bound(below, axes))

    @property
    def cost_in_training(self) -> str | None:
        return "31 passes over the array"

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        count = power_mean.count_along(x, axes)
        if count == 0:
            return reduction.largest_magnitude(x, axes)
        # In decimal: 99.9 percent of 1000 elements are 999, and not one more.
        share = fractions.Fraction(str(self.percentage)) / 100
        return _Smallest(tuple(axes), math.ceil(share * count))(x)


@dataclasses.dataclass(frozen=True)
class _Smallest(TargetDependent):
    """The k-th smallest magnitude over some axes."""

    axes: Axes
    k: int

    def reference(self, x: jax.Array) -> jax.Array:
        # The gradient goes to the elements of that magnitude, as that of a maximum.
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
        # Without a sign, floats are in the order of their bits.
        bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

        def add_bit(i: jax.Array, found: jax.Array) -> jax.Array:
            candidate = found | (np.int32(1 << 30) >> i)
            below = jnp.sum(
                bits < candidate, axis=self.axes, keepdims=True, dtype=jnp.int32
            )
            return jnp.where(below < self.k, candidate, found)

        start = jnp.zeros_like(jnp.min(bits, axis=self.axes, keepdims=True))
        found = lax.fori_loop(0, 31, add_bit, start)
        return lax.bitcast_convert_type(found, jnp.float32)

"""Calibration by a percentile of the elements of all batches."""

import dataclasses
from typing import Any

import jax

from aqtlite.calibration import base, histogram, min_max
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class PercentileOverBatches(base.Calibration):
    """The magnitude, or range, that a percentage of all batches does not exceed.

    Magnitudes are counted in a histogram with one bin between each pair of neighbouring
    floats of `mantissa_bits`. The edges are thus known before the first batch, and
    counts can be added in any order and for any split into batches. The bound is the
    upper edge of the bin that contains the percentile, and exceeds the percentile by a
    factor of at most ``1 + 2^-mantissa_bits``. NVIDIA calibrates activations in this
    way at 99.9 percent and above (Wu et al. 2020, arXiv:2004.09602).

    For a grid with a zero point, positive and negative elements are counted in
    histograms of their own, as zeros in the other one: the percentage holds at each
    end, as with `Percentile`.

    On a mesh with explicit axes, every device counts the whole batch.

    A batch with NaN or infinity is not counted. Bin counts saturate at 2^32 - 1.

    Raises:
        TypeError: if a field is not of the type declared.
        ValueError: if `percentage` is not above 1 and at most 100, or `mantissa_bits`
            not from 1 to 10.
    """

    percentage: float = 99.99
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

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> base.State:
        symmetric = grid.zero_point_range is None
        sides = ("counts",) if symmetric else ("above", "below")
        # An array for each: the same one could not be donated for both.
        return {side: histogram.empty(shape, self.mantissa_bits) for side in sides}

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        return self.masked_update(statistics, x, None, axes, grid)

    def masked_update(
        self,
        statistics: base.Statistics,
        x: jax.Array,
        mask: jax.Array | None,
        axes: Axes,
        grid: Numerics,
    ) -> base.State:
        parts = {"counts": x}
        if grid.zero_point_range is not None:
            above, below = min_max.both_sides(x)
            parts = {"above": above, "below": below}
        return {
            name: histogram.add(counts, parts[name], axes, self.mantissa_bits, mask)
            for name, counts in statistics.state.items()
        }

    def merge(
        self, statistics: base.Statistics, other: base.Statistics, grid: Numerics
    ) -> base.State:
        del grid
        return jax.tree.map(histogram.merge, statistics.state, other.state)

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, statistics: Any
    ) -> base.Range:
        del x, axes
        ends = {
            name: histogram.percentile(counts, self.percentage, self.mantissa_bits)
            for name, counts in statistics.state.items()
        }
        if grid.zero_point_range is None:
            return base.Range(ends["counts"])
        return base.Range(ends["above"], -ends["below"])

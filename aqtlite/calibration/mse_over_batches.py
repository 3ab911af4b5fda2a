"""Calibration by least squared error over all batches, from histograms."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import base, histogram, min_max, mse_search, scales
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes

_MANTISSA_BITS = 5


@dataclasses.dataclass(frozen=True)
class MseOverBatches(base.Calibration):
    """The fraction of the widest range with the least squared error over all batches.

    Magnitudes are counted in the histogram of `PercentileOverBatches`, with negative
    elements counted separately for a grid with a zero point. Among the ranges from
    ``c * low`` to ``c * high``, the one with the least expected error is chosen:
    ``step^2 / 12`` for each element inside (the variance of a uniform rounding error),
    and the squared distance from the range for each element outside. On a tie, the
    wider range is chosen.

    NaN or infinity makes the range NaN. Histograms of batches can be added in any
    order.

    >>> from aqtlite import numerics
    >>> x = jnp.array([[8.0] + 999 * [0.5]])
    >>> how, grid = MseOverBatches((1.0, 0.5, 0.25)), numerics.IntSymmetric(bits=2)
    >>> before = base.Statistics(jnp.float32(0), how.init_state((1, 1), grid))
    >>> after = base.Statistics(1, how.update(before, x, (0, 1), grid))
    >>> how.range(x, (0, 1), grid, after).high.tolist()
    [[2.0]]

    Raises:
        TypeError: if `candidates` is not a tuple or a list of numbers.
        ValueError: if there are no candidates, or one is not above 0 and at most 1.
    """

    candidates: tuple[float, ...] = mse_search.CANDIDATES
    """Fractions to try, in any order; stored with the largest first."""

    def __post_init__(self) -> None:
        fields.check(self, candidates=mse_search.checked_candidates)

    @property
    def has_state(self) -> bool:
        return True

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> base.State:
        if grid.arithmetic != "integer":
            raise ValueError(
                f"MseOverBatches is for grids of equal steps, not for {grid!r}; "
                "MaxOverBatches() and PercentileOverBatches() are for all"
            )
        sides = ("above",) if grid.zero_point_range is None else ("above", "below")
        return {
            side: {"counts": histogram.empty(shape, _MANTISSA_BITS)} for side in sides
        }

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
        parts = {"above": x}
        if grid.zero_point_range is not None:
            parts["above"], parts["below"] = min_max.both_sides(x)
        return {
            side: {
                "counts": histogram.add(counts, parts[side], axes, _MANTISSA_BITS, mask)
            }
            for side, counts in _counts_of(statistics).items()
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
        sides = _counts_of(statistics)
        ends = {
            side: histogram.percentile(counts, 100, _MANTISSA_BITS)
            for side, counts in sides.items()
        }
        fractions = jnp.asarray(self.candidates, jnp.float32)

        def error_of(fraction: jax.Array) -> jax.Array:
            reached = {side: fraction * end for side, end in ends.items()}
            scale, _ = scales.scale_and_zero_point(_range(reached), grid, po2=False)
            step = scale / jnp.float32(grid.unit)
            return sum(
                (_error(counts, reached[side], step) for side, counts in sides.items()),
                start=jnp.float32(0),
            )

        errors = lax.map(error_of, fractions)
        best = mse_search.best_fraction(errors, fractions)
        # If an end is NaN, so are all errors, and none is the least.
        return _range(
            {side: jnp.where(best > 0, best, 1) * end for side, end in ends.items()}
        )


def _counts_of(statistics: base.Statistics) -> dict[str, jax.Array]:
    """The histogram of each side."""
    return {side: state["counts"] for side, state in statistics.state.items()}


def _range(ends: dict[str, jax.Array]) -> base.Range:
    low = -ends["below"] if "below" in ends else None
    return base.Range(ends["above"], low)


def _error(counts: jax.Array, end: jax.Array, step: jax.Array) -> jax.Array:
    """The expected squared error of the elements counted in a histogram.

    Args:
        counts: histogram of magnitudes, bins on the first axis.
        end: end of the range.
        step: spacing of the grid's values.
    """
    edges = histogram.edges(_MANTISSA_BITS).astype(np.float64)
    middles = np.append(0, (edges[:-1] + edges[1:]) / 2).astype(np.float32)
    centers = jnp.asarray(middles).reshape(-1, *[1] * end.ndim)
    beyond = jnp.maximum(centers - end[None], 0)
    errors = jnp.where(beyond > 0, jnp.square(beyond), jnp.square(step)[None] / 12)
    # Zeros have no error: zero is on the grid.
    counted = counts.astype(jnp.float32).at[0].set(0)
    return jnp.sum(jnp.where(counted > 0, counted * errors, 0), axis=0)

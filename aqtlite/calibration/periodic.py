"""A range that is recomputed periodically."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from aqtlite.calibration import base, over_batches
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import vary_together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periodic(over_batches.OverBatches):
    """The range that another calibration finds once every `period` batches.

    For slow calibrations, such as searches: in training, the cost per step shrinks by a
    factor of `period`. The range is computed in the first batch and again every
    `period` batches; in between, values beyond it are clipped. A batch with NaN or
    infinity is not counted.

    The compiled program skips the calibration with `lax.cond`; under `jax.vmap` over
    statistics, it runs in every batch.

    >>> from aqtlite.calibration import MseSearch
    >>> Periodic(of=MseSearch((1.0, 0.9, 0.8)), period=500)
    Periodic(of=MseSearch(candidates=(1.0, 0.9, 0.8)), period=500)

    Raises:
        TypeError: if `period` is not an int.
        ValueError: if `period` is below 1.
    """

    period: int = 100
    """Number of batches that use one range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.check(self, period=fields.integer(1))

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        return self._in_turn(super().update, statistics, x, axes, grid)

    def masked_update(
        self,
        statistics: base.Statistics,
        x: jax.Array,
        mask: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.State:
        return self._in_turn(super().masked_update, statistics, x, mask, axes, grid)

    def _in_turn(
        self,
        update: Callable[..., base.State],
        statistics: base.Statistics,
        *args: Any,
    ) -> base.State:
        """The updated state in the first of `period` batches, otherwise the same."""
        *arrays, axes, grid = args
        # Inside `jax.shard_map` the branches have to vary along the same axes.
        statistics, *arrays = vary_together((statistics, *arrays))
        updated: base.State = lax.cond(
            statistics.batches % self.period == 0,
            lambda: update(statistics, *arrays, axes, grid),
            lambda: statistics.state,
        )
        return updated

    def _accumulated(
        self, name: str, before: jax.Array, value: jax.Array, batches: jax.Array
    ) -> jax.Array:
        del name, before, batches
        return value

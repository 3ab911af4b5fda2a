"""A range that is found anew every so many batches."""

import dataclasses

import jax
from jax import lax

from aqtlite.calibration import base, over_batches
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import vary_together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periodic(over_batches.OverBatches):
    """The range that another calibration found in the last of every `period` batches.

    For calibrations that take long, as searches do: in training they cost a `period`-th
    of what they would at every step. The range is found in the first batch, and again
    after every `period` batches; in between, what exceeds it is clipped. A NaN or an
    infinity in a batch in which it is found stays until the next search.

    Both the search and its omission are in the compiled program, and `lax.cond` runs
    one of them; under `jax.vmap` with statistics of its own for each element, both run.

    >>> from aqtlite.calibration import MseSearch
    >>> Periodic(of=MseSearch((1.0, 0.9, 0.8)), period=500)
    Periodic(of=MseSearch(candidates=(1.0, 0.9, 0.8)), period=500)

    Raises:
        TypeError: if `period` is not an int.
        ValueError: if it is below 1.
    """

    period: int = 100
    """How many batches take one range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.check(self, period=fields.integer(1))

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        found = super().update
        # Inside `jax.shard_map` the branches have to vary along the same axes.
        statistics, x = vary_together((statistics, x))
        updated: base.State = lax.cond(
            statistics.batches % self.period == 0,
            lambda: found(statistics, x, axes, grid),
            lambda: statistics.state,
        )
        return updated

    def _accumulated(
        self, name: str, before: jax.Array, value: jax.Array, batches: jax.Array
    ) -> jax.Array:
        del name, before, batches
        return value

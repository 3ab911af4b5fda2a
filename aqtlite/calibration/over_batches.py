"""Static ranges: statistics over batches of another calibration's ranges."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base
from aqtlite.calibration.abs_max import AbsMax
from aqtlite.lowering import fusion
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverBatches(base.Calibration, abc.ABC):
    """Base of calibrations that keep statistics of another calibration's ranges.

    The statistics determine the scale, so serving computes no reduction over
    activations. They do not depend on how batches are sharded: each range is of a whole
    batch, reduced over devices.

    Raises:
        TypeError: if `of` is not a calibration.
        ValueError: if `of` gathers statistics itself, or is learned.
    """

    of: base.Calibration = AbsMax()
    """Calibration that finds the range of each batch."""

    def __post_init__(self) -> None:
        base.check_looks_at_one_array(self.of, f"{type(self).__name__}.of")

    @property
    def has_state(self) -> bool:
        return True

    @property
    def ignores_zeros(self) -> bool:
        return self.of.ignores_zeros

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> base.State:
        # Of the ends that `of` gives: where the grid needs others, the contraction
        # raises, as with `of` alone.
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        found = jax.eval_shape(lambda x: self.of.range(x, (0,), grid, ()), one)
        return {"ends": {name: jnp.zeros(shape, jnp.float32) for name in _ends(found)}}

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        return self._with(statistics, self.of.range(x, axes, grid, ()))

    def masked_update(
        self,
        statistics: base.Statistics,
        x: jax.Array,
        mask: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.State:
        return self._with(statistics, self.of.masked_range(x, mask, axes, grid))

    def _with(self, statistics: base.Statistics, found: base.Range) -> base.State:
        """The state after a batch with this range."""
        before, batches = statistics.state["ends"], statistics.batches + 1
        # XLA would contract a product that a range ends with, and what follows.
        ends = {name: fusion.barrier(x) for name, x in _ends(found).items()}
        return {
            "ends": {
                name: self._accumulated(name, before[name], value, batches)
                for name, value in ends.items()
            }
        }

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, statistics: Any
    ) -> base.Range:
        del x, axes, grid
        ends = {
            name: self._statistic(value, statistics.batches)
            for name, value in statistics.state["ends"].items()
        }
        return base.Range(**ends)

    def merge(
        self, statistics: base.Statistics, other: base.Statistics, grid: Numerics
    ) -> base.State:
        if type(self)._merged is OverBatches._merged:
            return super().merge(statistics, other, grid)
        kept, others = statistics.state["ends"], other.state["ends"]
        return {
            "ends": {
                name: self._merged(name, kept[name], others[name]) for name in kept
            }
        }

    def _merged(self, name: str, kept: jax.Array, other: jax.Array) -> jax.Array:
        """Merges the statistics of one end of the range.

        Args:
            name: "high" or "low".
            kept: statistic of some batches.
            other: statistic of the other batches.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def _accumulated(
        self, name: str, before: jax.Array, value: jax.Array, batches: jax.Array
    ) -> jax.Array:
        """Updates the statistic of one end of the range with a batch.

        Args:
            name: "high" or "low".
            before: statistic of the earlier batches.
            value: this end of the batch's range.
            batches: number of batches, including this one.
        """

    def _statistic(self, kept: jax.Array, batches: jax.Array) -> jax.Array:
        """One end of the range, from the kept statistic; by default equal to it."""
        del batches
        return kept


def _ends(found: base.Range) -> dict[str, jax.Array]:
    """The ends of a range, by name."""
    return {name: x for name, x in found._asdict().items() if x is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxOverBatches(OverBatches):
    """The widest range of all batches: no value seen so far is clipped.

    >>> MaxOverBatches(of=AbsMax(clipping_scale=0.9))
    MaxOverBatches(of=AbsMax(clipping_scale=0.9))
    """

    def _accumulated(
        self, name: str, before: jax.Array, value: jax.Array, batches: jax.Array
    ) -> jax.Array:
        return jnp.where(batches == 1, value, _wider(name, before, value))

    def _merged(self, name: str, kept: jax.Array, other: jax.Array) -> jax.Array:
        return _wider(name, kept, other)


def _wider(name: str, first: jax.Array, other: jax.Array) -> jax.Array:
    """The outer of two lower or two upper ends."""
    return jnp.minimum(first, other) if name == "low" else jnp.maximum(first, other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanOverBatches(OverBatches):
    """The mean range of all batches, with equal weights."""

    def _accumulated(
        self, name: str, before: jax.Array, value: jax.Array, batches: jax.Array
    ) -> jax.Array:
        del name, batches
        return before + value

    def _merged(self, name: str, kept: jax.Array, other: jax.Array) -> jax.Array:
        del name
        return kept + other

    def _statistic(self, kept: jax.Array, batches: jax.Array) -> jax.Array:
        return kept / jnp.maximum(batches, 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovingAverage(OverBatches):
    """The exponential moving average of the ranges of the batches.

    ``kept = decay * kept + (1 - decay) * range``, divided by ``1 - decay ** batches``
    to correct the bias of starting at zero, as in Adam (Kingma and Ba 2015,
    arXiv:1412.6980).

    Raises:
        TypeError: if `decay` is not a number.
        ValueError: if `decay` is not from 0 to 1 in float32, 1 excluded.
    """

    decay: float = 0.99
    """Weight of the earlier average at each batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.check(self, decay=fields.fraction)

    def _accumulated(
        self, name: str, before: jax.Array, value: jax.Array, batches: jax.Array
    ) -> jax.Array:
        del name, batches
        decay = np.float32(self.decay)
        return fusion.sum_of_products((before, decay), (value, np.float32(1) - decay))

    def _statistic(self, kept: jax.Array, batches: jax.Array) -> jax.Array:
        count = jnp.maximum(batches, 1).astype(jnp.float32)
        return kept / (1 - np.float32(self.decay) ** count)

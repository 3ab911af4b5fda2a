"""The base of calibrations that change the range of another one."""

import abc
import dataclasses

import jax

from aqtlite.calibration import base
from aqtlite.calibration.abs_max import AbsMax
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class ChangedRange(base.Calibration, abc.ABC):
    """Base of calibrations for symmetric grids that change another one's bound.

    Raises:
        TypeError: if `of` is not a calibration.
        ValueError: if `of` gathers statistics or is learned.
    """

    of: base.Calibration = AbsMax()
    """Calibration that finds the bound to change."""

    def __post_init__(self) -> None:
        base.check_looks_at_one_array(self.of, f"{type(self).__name__}.of")

    @abc.abstractmethod
    def changed(self, bound: jax.Array, grid: Numerics) -> jax.Array:
        """The bound for a grid, given that of `of`: positive and finite, float32."""

    @property
    def ignores_zeros(self) -> bool:
        return self.of.ignores_zeros

    @property
    def is_blind(self) -> bool:
        return self.of.is_blind

    @property
    def cost_in_training(self) -> str | None:
        return self.of.cost_in_training

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        return self._with(self.of.range(x, axes, grid, state), grid)

    def masked_range(
        self, x: jax.Array, mask: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Range:
        return self._with(self.of.masked_range(x, mask, axes, grid), grid)

    def _with(self, found: base.Range, grid: Numerics) -> base.Range:
        if found.low is not None:
            # The error about it is that of a symmetric grid with a zero point.
            return found
        high = jax.lax.stop_gradient(found.high)
        is_number = jax.numpy.isfinite(high) & (high > 0)
        return base.Range(jax.numpy.where(is_number, self.changed(high, grid), high))

"""Calibration by given constants."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import base
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes


class _Known:
    """Base of calibrations that ignore the array."""

    @property
    def ignores_zeros(self) -> bool:
        return True

    @property
    def is_blind(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Constant(_Known, base.Calibration):
    """A constant magnitude, for symmetric grids.

    Larger values are clipped: set ``IntSymmetric(clip_gradient=True)`` if there are
    any.

    The array is not examined, so the scale costs nothing, but NaN goes undetected: it
    becomes an arbitrary value of the grid, where other calibrations make the channel
    NaN. `config.Tensor.find_nan` detects it.

    >>> import jax.numpy as jnp
    >>> Constant(6.0).bound(jnp.ones((2, 3)), (1,)).tolist()
    [[6.0], [6.0]]

    Raises:
        TypeError: if `magnitude` is not a number.
        ValueError: if `magnitude` is not positive and finite in float32.
    """

    magnitude: float
    """Largest magnitude that the grid covers."""

    def __post_init__(self) -> None:
        fields.check(self, magnitude=fields.positive)

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        return _full(x, axes, self.magnitude)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRange(_Known, base.Calibration):
    """A constant range, for grids with a zero point.

    Like `Constant`, it clips values outside the range and does not examine the array.

    >>> import jax.numpy as jnp
    >>> ConstantRange(min=-1, max=6).range(jnp.ones(3), (0,), None, ())
    Range(high=Array([6.], dtype=float32), low=Array([-1.], dtype=float32))

    Raises:
        TypeError: if `min` or `max` is not a number.
        ValueError: if one is not finite in float32, if both are equal, or if zero does
            not lie between them.
    """

    min: float
    """Smallest value of the range, not above zero."""

    max: float
    """Largest value of the range, not below zero."""

    def __post_init__(self) -> None:
        fields.check(self, min=fields.number, max=fields.number)
        if not (self.min <= 0 <= self.max and self.min < self.max):
            raise ValueError(
                "ConstantRange must contain zero, which a grid with a zero point stores"
                f" exactly, and something else, got min={self.min}, max={self.max}"
            )

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        del grid, state
        return base.Range(_full(x, axes, self.max), _full(x, axes, self.min))


def _full(x: jax.Array, axes: Iterable[int], value: float) -> jax.Array:
    """A constant array of x's shape, with size 1 along the axes."""
    shape = dn.shared_shape(x.shape, axes)
    # Else XLA would fold the constant scales of two operands into one, but not a
    # constant scale with the stored scale of a frozen weight.
    hidden: jax.Array = lax.optimization_barrier(jnp.full(shape, np.float32(value)))
    return hidden

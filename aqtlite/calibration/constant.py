"""Calibration by numbers that are known beforehand."""

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
    """A range that no array changes."""

    @property
    def ignores_zeros(self) -> bool:
        return True

    @property
    def is_blind(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Constant(_Known, base.Calibration):
    """A given magnitude, whatever the values are, for symmetric grids.

    What lies beyond is clipped: set ``IntSymmetric(clip_gradient=True)`` if values do.

    No element is looked at. The scale costs nothing, and a NaN is not found: it becomes
    some value of the grid, where calibrations by the values make its channel NaN
    (`config.Tensor.find_nan`).

    >>> import jax.numpy as jnp
    >>> Constant(6.0).bound(jnp.ones((2, 3)), (1,)).tolist()
    [[6.0], [6.0]]

    Raises:
        TypeError: if `magnitude` is not a number.
        ValueError: if it is not positive and finite in float32.
    """

    magnitude: float
    """The magnitude that the grid reaches."""

    def __post_init__(self) -> None:
        fields.check(self, magnitude=fields.positive)

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        return _full(x, axes, self.magnitude)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRange(_Known, base.Calibration):
    """A given smallest and largest value, for grids with a zero point.

    As `Constant`, it clips what lies beyond, and looks at no element.

    >>> import jax.numpy as jnp
    >>> ConstantRange(min=-1, max=6).range(jnp.ones(3), (0,), None, ())
    Range(high=Array([6.], dtype=float32), low=Array([-1.], dtype=float32))

    Raises:
        TypeError: if `min` or `max` is not a number.
        ValueError: if one is not finite in float32, if both are equal, or if zero does
            not lie between them.
    """

    min: float
    """The smallest value, not above zero."""

    max: float
    """The largest value, not below zero."""

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
    """An array of one value, of x's shape with size 1 along the axes."""
    shape = dn.shared_shape(x.shape, axes)
    # XLA would multiply the constant scales of two operands with each other first, but
    # not one of them with the stored scale of a frozen weight.
    hidden: jax.Array = lax.optimization_barrier(jnp.full(shape, np.float32(value)))
    return hidden

"""Calibration by the smallest and largest value."""

import dataclasses

import jax
import jax.numpy as jnp

from aqtlite.calibration import base
from aqtlite.lowering import reduction
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class MinMax(base.Calibration):
    """The smallest and largest value along the shared axes, for affine grids.

    ``low = min(x, 0)`` and ``high = max(x, 0)``: a grid with a zero point stores zero
    exactly, so the range contains zero (Jacob et al. 2018, arXiv:1712.05877). Over an
    empty axis both are 0. If an element is NaN or infinite, the scale is NaN.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, -3.0], [-2.0, -0.5]])
    >>> high, low = MinMax().range(x, (1,), None, ())
    >>> high.tolist(), low.tolist()
    ([[1.0], [0.0]], [[-3.0], [-2.0]])
    """

    @property
    def ignores_zeros(self) -> bool:
        return True

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        del grid, state
        return base.Range(*ends(x, axes))


def ends(x: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """The largest and smallest of zero and the values along axes, keepdims."""
    above, below = both_sides(x)
    low = -reduction.largest_magnitude(below, axes)
    return reduction.largest_magnitude(above, axes), low


def both_sides(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The positive and the negative elements of x, each with zeros elsewhere.

    For maxima of magnitudes, which propagate NaN on every platform. A NaN is in both
    results, because every comparison with NaN is false.
    """
    above = jnp.where(x < 0, jnp.float32(0), x)
    below = jnp.where(x > 0, jnp.float32(0), x)
    return above, below

"""Calibration by the smallest and largest value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base
from aqtlite.lowering import reduction
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinMax(base.Calibration):
    """The smallest and largest value along the shared axes, for affine grids.

    ``low = min(x, 0)`` and ``high = max(x, 0)``, times `clipping_scale`: a grid with a
    zero point stores zero exactly, so the range contains zero (Jacob et al. 2018,
    arXiv:1712.05877). Over an empty axis both are 0. If an element is NaN or infinite,
    the scale is NaN.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, -3.0], [-2.0, -0.5]])
    >>> high, low = MinMax().range(x, (1,), None, ())
    >>> high.tolist(), low.tolist()
    ([[1.0], [0.0]], [[-3.0], [-2.0]])

    Raises:
        ValueError: if `clipping_scale` is not positive, finite and normal in float32.
        TypeError: if `clipping_scale` is not a number.
    """

    clipping_scale: float | None = None
    """Fraction of both ends that the grid covers; values beyond are clipped. None: 1.
    Below 1, set ``IntAffine(clip_gradient=True)``."""

    def __post_init__(self) -> None:
        fields.check(self, clipping_scale=fields.or_none(fields.positive))

    @property
    def ignores_zeros(self) -> bool:
        return True

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        del grid, state
        high, low = ends(x, axes)
        if self.clipping_scale is None:
            return base.Range(high, low)
        factor = np.float32(self.clipping_scale)
        return base.Range(high * factor, low * factor)


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

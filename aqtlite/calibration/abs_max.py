"""Calibration by the largest magnitude."""

import dataclasses

import jax
import numpy as np

from aqtlite.calibration import base
from aqtlite.lowering import reduction
from aqtlite.numerics import fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsMax(base.Calibration):
    """The largest magnitude along the shared axes, times `clipping_scale` if given.

    ``bound = clipping_scale * max(|x|)``.

    >>> import jax.numpy as jnp
    >>> AbsMax().bound(jnp.array([[1.0, -3.0], [2.0, 0.5]]), (1,)).tolist()
    [[3.0], [2.0]]

    Raises:
        ValueError: if `clipping_scale` is not positive, finite and normal in float32.
        TypeError: if `clipping_scale` is not a number.
    """

    clipping_scale: float | None = None
    """Fraction of the largest magnitude that the grid covers; larger values are
    clipped. None: 1. Below 1, set ``IntSymmetric(clip_gradient=True)``."""

    def __post_init__(self) -> None:
        fields.check(self, clipping_scale=fields.or_none(fields.positive))

    @property
    def ignores_zeros(self) -> bool:
        return True

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        largest = reduction.largest_magnitude(x, axes)
        if self.clipping_scale is None:
            return largest
        return largest * np.float32(self.clipping_scale)

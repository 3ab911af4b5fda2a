"""Calibration by the mean magnitude."""

import dataclasses

import jax

from aqtlite.calibration import base, power_mean
from aqtlite.numerics import fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsMean(base.Calibration):
    """The power mean of the magnitudes, times a factor.

    ``bound = clipping_scale * mean(|x|^p)^(1/p)``, where the mean is over the nonzero
    elements, as in AQT's ``AbsMeanCalibration``.

    Powers are rounded to multiples of about 2^-30 of the largest one and summed exactly
    as integers, so the result does not depend on the program, the mesh or the order of
    the elements. With `p` other than 1 and 2, this requires that the platform's ``pow``
    is the same function in every program, as on CPUs.

    >>> import jax.numpy as jnp
    >>> AbsMean().bound(jnp.array([[1.0, -3.0], [0.0, 0.5]]), (1,)).tolist()
    [[2.0], [0.5]]
    >>> AbsMean(p=2, clipping_scale=3).bound(jnp.array([1.0, -7.0]), (0,)).tolist()
    [15.0]

    Raises:
        ValueError: if `p` is not from 1/8 to 8, or `clipping_scale` not positive and
            finite in float32.
        TypeError: if a field is not a number.
    """

    p: float = 1.0
    """Exponent of the power mean. Larger exponents weight large elements more."""

    clipping_scale: float | None = None
    """Multiple of the mean that the grid covers; larger values are clipped. None: 1.
    Set ``IntSymmetric(clip_gradient=True)``, since some values are always clipped."""

    def __post_init__(self) -> None:
        positive = fields.positive
        fields.check(self, p=positive, clipping_scale=fields.or_none(positive))
        if not 1 / 8 <= self.p <= 8:
            raise ValueError(
                f"AbsMean.p must be from 1/8 to 8, got {self.p}: powers beyond lose "
                "the digits of the mean; towards the maximum, use AbsMax"
            )

    @property
    def ignores_zeros(self) -> bool:
        return True

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        mean = power_mean.power_mean_of_nonzero(x, axes, self.p)
        if self.clipping_scale is None:
            return mean
        return power_mean.multiple(mean, self.clipping_scale)

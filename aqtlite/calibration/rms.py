"""Calibration by the root mean square."""

import dataclasses

import jax

from aqtlite.calibration import base, power_mean
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class RMS(base.Calibration):
    """The root mean square along the shared axes, times a factor.

    ``bound = factor * sqrt(mean(x^2))``: for values with a known zero-mean
    distribution, a fixed number of standard deviations. For Gaussian values, the
    squared error is least at about 2 standard deviations for 2 bits, 2.7 for 4 bits and
    4 for 8 bits (Banner et al. 2019, arXiv:1810.05723, derive such factors).

    The mean is over all elements, including zeros. As with `AbsMean`, it has the same
    bits in every program.

    >>> import jax.numpy as jnp
    >>> RMS(3.0).bound(jnp.array([[1.0, -7.0], [0.0, 0.0]]), (1,)).tolist()
    [[15.0], [0.0]]

    Raises:
        ValueError: if `factor` is not positive, or not finite in float32.
        TypeError: if `factor` is not a number.
    """

    factor: float
    """Multiple of the root mean square that the grid covers; larger values are clipped.
    If there are any, set ``IntSymmetric(clip_gradient=True)``."""

    def __post_init__(self) -> None:
        fields.check(self, factor=fields.positive)

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        mean = power_mean.power_mean(x, axes, 2.0)
        return power_mean.multiple(mean, self.factor)

    def masked_range(
        self, x: jax.Array, mask: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Range:
        del grid
        count = power_mean.number_of(mask, axes)
        mean = power_mean.power_mean_of(x, count, axes, 2.0)
        return base.Range(power_mean.multiple(mean, self.factor))

"""What learned calibrations share: levels, positive parameters, gradients of a step."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, power_mean
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes

_SMALLEST = np.float32(2.0**-100)
"""At it, a scale and its reciprocal are normal, on every grid."""


def magnitude(parameter: jax.Array) -> jax.Array:
    """The positive number that a parameter stands for: its magnitude, not zero.

    An optimizer may step across zero, where a scale has no meaning. On the other side
    the parameter works like its negative, with a gradient of the other sign
    (`sign_of`), so that training goes on.
    """
    return jnp.maximum(jnp.abs(parameter), _SMALLEST)


def sign_of(parameter: jax.Array) -> jax.Array:
    """The derivative of `magnitude`, and 1 at zero, which is left upwards."""
    return jnp.where(parameter < 0, np.float32(-1), np.float32(1))


def or_one(parameter: jax.Array) -> jax.Array:
    """Replaces zero, which an array of zeros gives at the start, by 1."""
    return jnp.where(parameter < _SMALLEST, np.float32(1), parameter)


def levels(grid: Numerics) -> tuple[float, float]:
    """The smallest and the largest value of a grid, in steps from zero.

    Of a grid with a zero point, the one that is nearest to a stored zero is meant.
    """
    if grid.zero_point_range is not None:
        smallest, largest = grid.zero_point_range
        zero = min(max(0, smallest), largest)
        return float(smallest - zero), float(largest - zero)
    with jax.ensure_compile_time_eval():
        ends = jnp.array([-grid.bound, grid.bound], jnp.float32)
        noise = jnp.zeros(2, jnp.uint32) if grid.needs_noise else None
        low, high = np.asarray(grid.decode(grid.round(ends, noise)), np.float32)
    return float(low) * grid.unit, float(high) * grid.unit


def range_of_step(step: jax.Array, grid: Numerics) -> base.Range:
    """The range that gives a grid this scale, and a zero point next to zero."""
    if grid.zero_point_range is None:
        return base.Range(step * np.float32(grid.bound))
    smallest, largest = levels(grid)
    return base.Range(step * np.float32(largest), step * np.float32(smallest))


def is_inside(
    values: base.Quantized, smallest: float, largest: float
) -> tuple[jax.Array, jax.Array]:
    """The elements strictly between two levels, and those at or above the larger."""
    position = values.x / values.scale
    above = position >= largest
    return (position > smallest) & ~above, above


def step_gradient(values: base.Quantized, smallest: float, largest: float) -> jax.Array:
    """The derivative of rounded values by the step (Esser et al. 2020, equation 3).

    ``round(x / s) - x / s`` between the levels, and the level at and beyond them.
    """
    inside, above = is_inside(values, smallest, largest)
    level = jnp.where(above, np.float32(largest), np.float32(smallest))
    return jnp.where(inside, (values.rounded - values.x) / values.scale, level)


def gradient_scale(
    given: float | None, x: jax.Array, axes: Axes, largest: float
) -> np.float32:
    """``1 / sqrt(n Q)`` for n elements that share a step, unless another is given."""
    if given is not None:
        return np.float32(given)
    count = max(power_mean.count_along(x, axes), 1)
    return np.float32(1 / math.sqrt(count * largest))


def total(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over the axes that share a parameter, keepdims."""
    return jnp.sum(x, axis=axes, keepdims=True)

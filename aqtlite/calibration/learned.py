"""Helpers of learned calibrations: levels, positive parameters, step gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, power_mean
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes

_SMALLEST = np.float32(2.0**-100)
"""Smallest magnitude of a parameter; the scale and its reciprocal are then normal
floats on every grid."""


def magnitude(parameter: jax.Array) -> jax.Array:
    """The magnitude of a parameter, at least 2^-100.

    An optimizer may move a parameter across zero. A negative parameter acts like its
    positive counterpart, with the gradient's sign flipped (`sign_of`), so that training
    can continue.
    """
    return jnp.maximum(jnp.abs(parameter), _SMALLEST)


def sign_of(parameter: jax.Array) -> jax.Array:
    """The derivative of `magnitude`; 1 at zero."""
    return jnp.where(parameter < 0, np.float32(-1), np.float32(1))


def or_one(parameter: jax.Array) -> jax.Array:
    """Replaces an initial value of zero, from an all-zero array, by 1."""
    return jnp.where(parameter < _SMALLEST, np.float32(1), parameter)


def levels(grid: Numerics) -> tuple[float, float]:
    """The smallest and largest value of a grid, in steps from zero.

    For a grid with a zero point: with the zero point closest to 0.
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
    """The range for which a grid has this scale, with the zero point closest to 0."""
    if grid.zero_point_range is None:
        return base.Range(step * np.float32(grid.bound))
    smallest, largest = levels(grid)
    return base.Range(step * np.float32(largest), step * np.float32(smallest))


def is_inside(
    values: base.Quantized, smallest: float, largest: float
) -> tuple[jax.Array, jax.Array]:
    """Masks of the elements strictly between two levels, and at or above the larger."""
    position = values.x / values.scale
    above = position >= largest
    return (position > smallest) & ~above, above


def step_gradient(values: base.Quantized, smallest: float, largest: float) -> jax.Array:
    """The derivative of rounded values by the step (Esser et al. 2020, equation 3).

    ``round(x / s) - x / s`` strictly between the levels; elsewhere the nearest level.
    """
    inside, above = is_inside(values, smallest, largest)
    level = jnp.where(above, np.float32(largest), np.float32(smallest))
    return jnp.where(inside, (values.rounded - values.x) / values.scale, level)


def gradient_scale(
    given: float | None, x: jax.Array, axes: Axes, largest: float
) -> np.float32:
    """The given factor, or ``1 / sqrt(n Q)`` for n elements that share a step."""
    if given is not None:
        return np.float32(given)
    count = max(power_mean.count_along(x, axes), 1)
    return np.float32(1 / math.sqrt(count * largest))


def total(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over the axes that share a parameter, keepdims."""
    return jnp.sum(x, axis=axes, keepdims=True)

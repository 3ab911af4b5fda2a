"""Counts of the batches in statistics.

The count is float32, like the statistics, so that the variables of a model can be
differentiated as a whole: JAX rejects integers there. It is exact up to 2^24 batches.

A fractional count is invalid: an optimizer changed it, for instance by weight decay, or
it is a mean of several counts. The statistics were then changed as well.

A batch with a NaN or an infinity enters no statistics, since later scales would then be
NaN, and is not counted. The result of the call that saw it is NaN all the same
(`aqtlite.contraction.poison`).
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration.base import Calibration, Statistics
from aqtlite.lowering import reduction
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes

T = TypeVar("T")

REMEDY = (
    "gather some, in Flax with aqtlite.flax.calibrate or model.apply(..., "
    "mutable=['aqt_stats']); a batch with NaN or infinity enters none"
)
"""What to do about statistics of no batch."""

REMEDY_OF_GRADIENTS = (
    "its first update is the gradient of a step; one with NaN or infinity enters none, "
    "and leaves the step NaN under jax.jit: begin with a batch of finite gradients"
)
"""What to do about statistics of no gradient."""


def no_batches() -> jax.Array:
    """The count before the first batch."""
    return jnp.zeros((), jnp.float32)


def before_first(
    calibration: Calibration, shape: tuple[int, ...], grid: Numerics
) -> Statistics:
    """Statistics before the first batch.

    Args:
        calibration: calibration that gathers statistics.
        shape: shape of the scale.
        grid: number grid.
    """
    return Statistics(no_batches(), calibration.init_state(shape, grid))


def updated(
    calibration: Calibration,
    statistics: Statistics,
    x: jax.Array,
    axes: Axes,
    grid: Numerics,
) -> Statistics:
    """Statistics after one more batch; one that is not finite changes nothing.

    Args:
        calibration: calibration that gathers the statistics.
        statistics: statistics of the earlier batches.
        x: batch, float32.
        axes: axes that share a scale.
        grid: number grid.
    """
    state = calibration.update(statistics, x, axes, grid)
    after = Statistics(statistics.batches + 1, state)
    return chosen(is_finite(x, axes), after, statistics)


def masked(
    calibration: Calibration,
    statistics: Statistics,
    x: jax.Array,
    mask: jax.Array,
    axes: Axes,
    grid: Numerics,
) -> Statistics:
    """Statistics after one more batch, of which only some elements count.

    A batch with no such element, or in which one is not finite, changes nothing.

    Args:
        calibration: calibration that gathers the statistics.
        statistics: statistics of the earlier batches.
        x: batch, float32.
        mask: bool of the shape of x, True for elements that count.
        axes: axes that share a scale.
        grid: number grid.
    """
    x = jnp.where(mask, x, jnp.float32(0))
    state = calibration.masked_update(statistics, x, mask, axes, grid)
    after = Statistics(statistics.batches + 1, state)
    return chosen(jnp.any(mask) & is_finite(x, axes), after, statistics)


def is_finite(x: jax.Array, axes: Axes) -> jax.Array:
    """Whether all elements of a batch are finite.

    Args:
        x: batch, float32.
        axes: axes that share a scale. Maxima along these are often computed anyway.
    """
    return jnp.all(reduction.largest_magnitude(x, axes) < np.float32(np.inf))


def chosen(enters: jax.Array, after: T, before: T) -> T:
    """Returns statistics after a batch if it enters them, and otherwise before."""
    found: T = jax.tree.map(lambda x, y: jnp.where(enters, x, y), after, before)
    return found


def merged(
    calibration: Calibration, one: Statistics, other: Statistics, grid: Numerics
) -> Statistics:
    """Merges two statistics.

    Args:
        calibration: calibration that gathered the statistics.
        one: statistics of any number of batches, possibly zero.
        other: statistics of other batches, possibly zero.
        grid: number grid.

    Raises:
        ValueError: if the statistics depend on the order of batches.
    """

    def of_any(one_leaf: jax.Array, other_leaf: jax.Array, both: jax.Array) -> Any:
        rest = jnp.where(other.batches == 0, one_leaf, both)
        return jnp.where(one.batches == 0, other_leaf, rest)

    both = calibration.merge(one, other, grid)
    state = jax.tree.map(of_any, one.state, other.state, both)
    return Statistics(one.batches + other.batches, state)


def is_of_batches(count: Any) -> jax.Array:
    """Whether a count is a whole number and at least 1."""
    return jnp.logical_and(count >= 1, count == jnp.floor(count))


def is_known_zero(count: Any) -> bool:
    """Whether statistics are known to be of no batch, as outside of `jax.jit`."""
    known = lax.stop_gradient(count)
    return not isinstance(known, jax.core.Tracer) and not np.asarray(known).any()


def problem(count: Any) -> str | None:
    """Describes what is wrong with statistics; None if valid or not known.

    The count is known in a call that is differentiated, but not under `jax.jit`.

    Args:
        count: number of batches in the statistics.
    """
    known = lax.stop_gradient(count)
    if isinstance(known, jax.core.Tracer) or np.asarray(is_of_batches(known)).all():
        return None
    if (np.asarray(known) == np.floor(known)).all():
        return "no statistics yet"
    return (
        "statistics that weight decay or a mean changed (hand optimizers 'params' "
        "without 'aqt_stats')"
    )

"""Counting the batches that statistics are of.

The number is float32, as statistics are, so that the variables of a model can be
differentiated as a whole: JAX refuses integers there. It is exact up to 2^24 batches.

A number that is not whole is none of batches: an optimizer changed it, by weight decay
for instance, or it is a mean, and so are the statistics beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration.base import Calibration, Statistics
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes


def no_batches() -> jax.Array:
    """The number before the first batch."""
    return jnp.zeros((), jnp.float32)


def before_first(
    calibration: Calibration, shape: tuple[int, ...], grid: Numerics
) -> Statistics:
    """Statistics before the first batch.

    Args:
        calibration: one that gathers statistics.
        shape: shape of the scale.
        grid: the grid.
    """
    return Statistics(no_batches(), calibration.init_state(shape, grid))


def updated(
    calibration: Calibration,
    statistics: Statistics,
    x: jax.Array,
    axes: Axes,
    grid: Numerics,
) -> Statistics:
    """Statistics after one more batch.

    Args:
        calibration: the one that gathers them.
        statistics: statistics of the batches before.
        x: the batch, float32.
        axes: axes that share a scale.
        grid: the grid.
    """
    state = calibration.update(statistics, x, axes, grid)
    return Statistics(statistics.batches + 1, state)


def merged(
    calibration: Calibration, one: Statistics, other: Statistics, grid: Numerics
) -> Statistics:
    """Statistics of the batches of two.

    Args:
        calibration: the one that gathers them.
        one: statistics of some batches, or of none.
        other: statistics of other batches, or of none.
        grid: the grid.

    Raises:
        ValueError: if they depend on the order of batches.
    """

    def of_any(one_leaf: jax.Array, other_leaf: jax.Array, both: jax.Array) -> Any:
        rest = jnp.where(other.batches == 0, one_leaf, both)
        return jnp.where(one.batches == 0, other_leaf, rest)

    both = calibration.merge(one, other, grid)
    state = jax.tree.map(of_any, one.state, other.state, both)
    return Statistics(one.batches + other.batches, state)


def is_of_batches(count: Any) -> jax.Array:
    """Whether a number is of one batch at least, and of whole ones."""
    return jnp.logical_and(count >= 1, count == jnp.floor(count))


def problem(count: Any) -> str | None:
    """What statistics have, if they are certainly not those of batches.

    In a call that is differentiated their number is known, under `jax.jit` it is not.

    Args:
        count: number of their batches.
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

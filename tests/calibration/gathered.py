"""Statistics that are gathered and counted as frameworks do."""

import functools

import jax
import jax.numpy as jnp

from aqtlite.calibration import Statistics


def before_first(how, shape, grid):
    """Statistics of no batch."""
    return Statistics(jnp.zeros(()), how.init_state(shape, grid))


def after(how, statistics, x, axes, grid):
    """Statistics of one more batch."""
    return Statistics(statistics.batches + 1, how.update(statistics, x, axes, grid))


def gathered_eagerly(how, batches, axes, grid):
    """Statistics of batches, and the range that they give, one operation at a time."""
    shape = (1 if i in axes else size for i, size in enumerate(batches[0].shape))
    statistics = before_first(how, tuple(shape), grid)
    for x in batches:
        statistics = after(how, statistics, x, axes, grid)
    return statistics, how.range(batches[-1], axes, grid, statistics)


gathered = functools.partial(jax.jit, static_argnums=(0, 2, 3))(gathered_eagerly)
"""Statistics of batches, and the range that they give, in one program."""

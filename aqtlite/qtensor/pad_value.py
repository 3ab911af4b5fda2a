"""The stored value of zero, which pads a `QTensor`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import Numerics
from aqtlite.qtensor.qtensor import QTensor


def stored_zero(q: QTensor) -> np.ndarray:
    """The stored value that stands for zero on a grid without zero points.

    Raises:
        ValueError: if the grid has no zero.
    """
    grid = q.numerics
    if grid is None:
        return np.zeros((), q.qvalue.dtype)
    if not has_zero(grid):
        raise ValueError(
            f"pad of a QTensor of shape {q.shape} with zeros, which its grid {grid!r} "
            "does not have; pad the result of .dequant() instead"
        )
    return np.asarray(_zero(grid))[0]


@functools.lru_cache
def has_zero(grid: Numerics) -> bool:
    """Whether a grid without zero points stores zero as zero."""
    if grid.zero_point_range is not None:
        return True
    with jax.ensure_compile_time_eval():
        return bool((grid.decode(_zero(grid)) == 0).all())


def _zero(grid: Numerics) -> jax.Array:
    with jax.ensure_compile_time_eval():
        noise = jnp.zeros((1,), jnp.uint32) if grid.needs_noise else None
        return grid.round(jnp.zeros((1,), jnp.float32), noise)

"""Stored values of a grid: dtypes for checkpoints, and the stored zero.

Orbax stores int4 but not uint4: serving conversion bitcasts frozen weights of uint4 to
int4, and readers of stored values take both.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.numerics import Numerics


def to_save(values: jax.Array) -> jax.Array:
    """Returns stored values in a dtype that checkpoints support: uint4 as int4."""
    if values.dtype != jnp.uint4:
        return values
    return lax.bitcast_convert_type(values, jnp.int4)


def on_grid(values: jax.Array, grid: Numerics | None) -> jax.Array:
    """Restores the unsigned values of a uint4 grid; returns others unchanged.

    Args:
        values: stored values; for a uint4 grid, also bitcast to int4, or that widened
            to int8.
        grid: the grid, None for integers.
    """
    if grid is None or grid.storage_dtype != jnp.uint4:
        return values
    if values.dtype == jnp.int4:
        return lax.bitcast_convert_type(values, jnp.uint4)
    if values.dtype == jnp.int8:
        return (values & np.int8(15)).astype(jnp.uint8)
    return values


@functools.lru_cache
def zero(grid: Numerics) -> np.ndarray | None:
    """Returns the stored value of zero on a grid without zero points; None if none."""
    # Whatever mesh is traced for: an abstract one has no devices to compute on.
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), no_mesh:
        noise = jnp.zeros((1,), jnp.uint32) if grid.needs_noise else None
        stored = grid.round(jnp.zeros((1,), jnp.float32), noise)
        is_zero = (grid.decode(stored) == 0).all()
    return np.asarray(stored)[0] if is_zero else None

"""Stored values of a grid: the dtypes that hold their bits, and that of zero.

Orbax stores int4, and no uint4: conversion keeps frozen weights of uint4 as int4 of the
same bits, and what reads stored values takes either.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.numerics import Numerics


def to_save(values: jax.Array) -> jax.Array:
    """Stored values in a dtype that checkpoint libraries have: uint4 as int4."""
    if values.dtype != jnp.uint4:
        return values
    return lax.bitcast_convert_type(values, jnp.int4)


def on_grid(values: jax.Array, grid: Numerics | None) -> jax.Array:
    """The stored values of a grid, in its storage dtype where that is uint4.

    Args:
        values: the stored values; of a grid of uint4 also int4 of the same bits, or
            those widened to int8.
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
    """The stored value of zero on a grid without zero points; None if it has none."""
    with jax.ensure_compile_time_eval():
        noise = jnp.zeros((1,), jnp.uint32) if grid.needs_noise else None
        stored = grid.round(jnp.zeros((1,), jnp.float32), noise)
        is_zero = (grid.decode(stored) == 0).all()
    return np.asarray(stored)[0] if is_zero else None

"""Stored values of uint4 that are kept as int4 of the same bits.

Orbax stores int4, and no uint4: conversion keeps frozen weights under the other name,
and what reads stored values takes either.
"""

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

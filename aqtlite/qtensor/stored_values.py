"""Stored values of a grid: dtypes for serving and checkpoints, and the stored zero.

Serving conversion stores what has four bits as int4: frozen weights of uint4 bitcast,
since Orbax stores int4 but not uint4, and floats of up to four bits by their codes,
since few platforms have a dtype for them. Readers of stored values take both.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.numerics import Numerics
from aqtlite.qtensor import float_codes


def to_save(values: jax.Array, grid: Numerics | None) -> jax.Array:
    """Returns stored values in a dtype for serving: those of four bits as int4.

    Args:
        values: values in the storage dtype of the grid.
        grid: the grid, None for integers.
    """
    if float_codes.has_codes(grid):
        values = float_codes.encode(values, grid)
    if values.dtype != jnp.uint4:
        return values
    return lax.bitcast_convert_type(values, jnp.int4)


def has_codes(grid: Numerics | None) -> bool:
    """Returns True if values of a grid are stored as codes of four bits for floats."""
    if grid is None:
        return False
    has_table = grid.arithmetic == "table" and grid.storage_dtype == jnp.uint4
    return has_table or float_codes.has_codes(grid)


def on_grid(values: jax.Array, grid: Numerics | None) -> jax.Array:
    """Restores the stored values of a grid from int4; returns others unchanged.

    Args:
        values: stored values; for a grid stored as uint4, or of floats of up to four
            bits, also as `to_save` returns them, or those widened to int8.
        grid: the grid, None for integers.
    """
    is_unsigned = grid is not None and grid.storage_dtype == jnp.uint4
    if not (is_unsigned or float_codes.has_codes(grid)):
        return values
    if values.dtype == jnp.int4:
        codes = lax.bitcast_convert_type(values, jnp.uint4)
    elif values.dtype == jnp.int8:
        codes = (values & np.int8(15)).astype(jnp.uint8)
    else:
        return values
    return float_codes.decode(codes, grid) if float_codes.has_codes(grid) else codes


@functools.lru_cache
def zero(grid: Numerics) -> np.ndarray | None:
    """Returns the stored value of zero on a grid without zero points; None if none."""
    with _before_a_call():
        noise = jnp.zeros((1,), jnp.uint32) if grid.needs_noise else None
        stored = grid.round(jnp.zeros((1,), jnp.float32), noise)
        is_zero = (grid.decode(stored) == 0).all()
    return np.asarray(stored)[0] if is_zero else None


@functools.cache
def floats_of_codes(grid: Numerics) -> tuple[float, ...]:
    """Returns the floats that the 16 codes of a grid stand for, which `has_codes`."""
    with _before_a_call():
        codes = lax.bitcast_convert_type(jnp.arange(16, dtype=jnp.uint4), jnp.int4)
        values = grid.decode(on_grid(codes, grid))
    return tuple(np.asarray(values, np.float32).tolist())


@contextlib.contextmanager
def _before_a_call() -> Iterator[None]:
    """Computes in tracing, whatever mesh is traced for: an abstract one has no devices
    to compute on."""
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), no_mesh:
        yield

"""Codes of floats of up to four bits: a sign, and the place among the magnitudes.

Those of float4_e2m1fn are those of the OCP Microscaling specification
(arXiv:2310.10537), as other people's checkpoints have them.
"""

import functools
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import float8
from aqtlite.numerics import Float, Numerics
from aqtlite.shapes.sharding import looked_up

_MAGNITUDES = 8


def has_codes(grid: Numerics | None) -> TypeGuard[Float]:
    """Returns True if a grid is one of floats of up to four bits."""
    return isinstance(grid, Float) and grid.bits <= 4


def encode(stored: jax.Array, grid: Float) -> jax.Array:
    """Returns the codes of stored values, uint4.

    >>> from aqtlite import numerics
    >>> grid = numerics.Float.from_dtype("float4_e2m1fn")
    >>> codes = encode(grid.round(jnp.array([-0.5, 3.0]), None), grid)
    >>> codes.tolist(), decode(codes, grid).tolist()
    ([9, 5], [-0.5, 3.0])
    """
    floats = float8.widened(stored)
    magnitude = jnp.abs(floats)
    code = jnp.zeros(stored.shape, jnp.uint8)
    for value in grid.magnitudes[1:]:
        code += (magnitude >= np.float32(value)).astype(jnp.uint8)
    sign = lax.bitcast_convert_type(floats, jnp.uint32) >> 31
    return (code + sign.astype(jnp.uint8) * np.uint8(_MAGNITUDES)).astype(jnp.uint4)


def decode(codes: jax.Array, grid: Float) -> jax.Array:
    """Returns stored values from their codes.

    Args:
        codes: unsigned integers below 16.
        grid: grid of the values.
    """
    # XLA:CPU would convert a table of floats at every look.
    table = jnp.asarray(_values(grid).view(np.uint8))
    found = looked_up(table, codes.astype(jnp.uint32))
    return lax.bitcast_convert_type(found, grid.storage_dtype)


@functools.cache
def _values(grid: Float) -> np.ndarray:
    """The values of the 16 codes, in the storage dtype."""
    missing = _MAGNITUDES - len(grid.magnitudes)
    magnitudes = np.array(grid.magnitudes + (grid.bound,) * missing)
    return np.concatenate([magnitudes, -magnitudes]).astype(grid.storage_dtype)

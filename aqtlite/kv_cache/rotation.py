"""Rotations of queries and keys, and of values, before they are quantized.

A rotation of both queries and keys leaves their products as they are. One of the values
is taken back from the result, since attention sums positions, and not channels:
``sum_t p_t v_t = (sum_t p_t (v_t R)) R^T``.
"""

import jax
import numpy as np

from aqtlite import config
from aqtlite.lowering import exact, hadamard


def rotated(x: jax.Array, how: config.Hadamard | None) -> jax.Array:
    """Rotates the channels of each head, the last axis, to float32 (or float64).

    Raises:
        ValueError: if the size of the rotation does not divide the number of channels,
            and ``how.fit`` is not set.
    """
    if how is None or (order := _order(x.shape[-1], how)) == 1:
        return x
    return hadamard.rotated(_wide(x), x.ndim - 1, order, how.seed)


def rotated_back(x: jax.Array, how: config.Hadamard | None) -> jax.Array:
    """Undoes `rotated`."""
    if how is None or (order := _order(x.shape[-1], how)) == 1:
        return x
    return hadamard.rotated_back(_wide(x), x.ndim - 1, order, how.seed)


def _order(depth: int, how: config.Hadamard) -> int:
    order = hadamard.largest_order(depth, how.size)
    if how.size not in (None, order) and not how.fit:
        raise ValueError(
            f"fwd.rotation.size={how.size} does not divide the {depth} channels of a "
            "head: choose one that does, or set fit=True to rotate smaller blocks"
        )
    return order


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype == np.float64 else exact.float32(x)

"""Axes cut into blocks: the arrays, and contractions as sums over tiles.

An operand has blocks along an axis where its scale (keepdims) has more than one element
there, and fewer than the operand. Where they lie along contracting axes, the
contraction is cut into tiles within which no scale varies: a batch of smaller ones.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import explicit_sharding


def has_blocks(shape: Sequence[int], scale_shape: Sequence[int]) -> bool:
    """Returns True if an array of this shape has blocks of several elements."""
    return any(
        count not in (1, size) for size, count in zip(shape, scale_shape, strict=True)
    )


def split(x: jax.Array, scale_shape: Sequence[int]) -> jax.Array:
    """Splits each axis with blocks into one of blocks and one within a block.

    Args:
        x: array of any shape.
        scale_shape: shape of its scale.
    """
    for axis in reversed(range(x.ndim)):
        if scale_shape[axis] not in (1, x.shape[axis]):
            x = block_shapes.split_axis(x, axis, scale_shape[axis])
    return x


def split_keepdims(x: jax.Array, shape: Sequence[int], first: int = 0) -> jax.Array:
    """Reshapes values of blocks so that they broadcast to a `split` array.

    Args:
        x: values of blocks, keepdims, such as a scale.
        shape: shape of the array.
        first: number of axes of x in front of those of the array.
    """
    for axis in reversed(range(len(shape))):
        if x.shape[first + axis] not in (1, shape[axis]):
            x = jnp.expand_dims(x, first + axis + 1)
    return x


def merge(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `split`.

    Args:
        x: array that `split` returned.
        like: array of the shape before `split`, with the sharding of the result.
    """
    return lax.reshape(x, like.shape, out_sharding=explicit_sharding(like))


def cut(
    x: jax.Array, axes: Sequence[int], counts: Sequence[int], groups: int = 1
) -> jax.Array:
    """Cuts axes into tiles, along new leading axes.

    Args:
        x: operand, or a keepdims array of it, such as its scale.
        axes: axes to cut.
        counts: number of tiles along each of `axes`; an axis of one tile is not cut.
        groups: number of groups along each axis; a tile has an equal part of each.

    Returns:
        `x` with a new leading axis for each axis that was cut, of size 1 where the
        axis of x was.
    """
    front = 0
    for axis, count in reversed(list(zip(axes, counts, strict=True))):
        if count > 1:
            x = _cut_axis(x, axis + front, count, groups)
            front += 1
    return x


def _cut_axis(x: jax.Array, axis: int, count: int, groups: int) -> jax.Array:
    if x.shape[axis] == 1:
        return jnp.expand_dims(x, 0)
    x = block_shapes.repeat_into(x, axis, groups * count)
    if groups == 1:
        return jnp.moveaxis(block_shapes.split_axis(x, axis, count), axis, 0)
    x = block_shapes.split_axis(
        block_shapes.split_axis(x, axis, groups), axis + 1, count
    )
    return block_shapes.merge_with_next(jnp.moveaxis(x, axis + 1, 0), axis + 1)

"""Shapes of scales, with one scale for each block of an array.

Along an axis of `size` elements there are `count` scales: one (the axis shares a
scale), one for each element, or one for each of several blocks of equal size. With
blocks along contracting axes, the contraction is cut into tiles within which scales are
constant: a batch of smaller contractions.
"""

import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.shapes.sharding import explicit_sharding, num_devices, spec_of_axes

Shape = tuple[int, ...]


def block_sizes(shape: Sequence[int], scale_shape: Sequence[int]) -> Shape:
    """Returns the number of elements that share a scale along each axis."""
    pairs = zip(shape, scale_shape, strict=True)
    return tuple(size if count == 1 else size // (count or 1) for size, count in pairs)


def without_minus_one(shape: Sequence[int], new_shape: Sequence[int]) -> Shape:
    """Returns the sizes of a reshape, with -1 replaced by the size that fits.

    Raises:
        ValueError: if the sizes do not fit.
    """
    sizes = tuple(operator.index(size) for size in new_shape)
    total, known = math.prod(shape), math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known:
        sizes = tuple(total // known if size == -1 else size for size in sizes)
    if math.prod(sizes) != total or min(sizes, default=0) < 0:
        raise ValueError(
            f"a QTensor of shape {tuple(shape)} cannot be reshaped to "
            f"{tuple(new_shape)}"
        )
    return sizes


def from_the_front(axis: int, ndim: int) -> int:
    """Returns an axis counted from the front.

    Raises:
        ValueError: if the axis is out of range.
    """
    axis = operator.index(axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for a QTensor of {ndim} axes")
    return axis % ndim


def reshaped_scale(
    shape: Sequence[int], scale_shape: Sequence[int], new_shape: Sequence[int]
) -> Shape:
    """Returns the shape of the scale of a reshaped array.

    Args:
        shape: shape of the array.
        scale_shape: shape of the scale.
        new_shape: new shape of the array, with as many elements.

    Raises:
        ValueError: if elements that share a scale would no longer be adjacent.
    """
    if tuple(new_shape) == tuple(shape):
        return tuple(scale_shape)
    counts = [1] * len(new_shape)
    for old, new in _pieces(shape, new_shape):
        sizes = [new_shape[axis] for axis in new]
        if len(old) == len(new) == 1:
            found = [scale_shape[old[0]]]
        else:
            block = _run([shape[axis] for axis in old], [scale_shape[a] for a in old])
            found = [] if block is None else _cut(sizes, block)
        if not found:
            raise ValueError(
                f"a QTensor of shape {tuple(shape)} with a scale of shape "
                f"{tuple(scale_shape)} cannot be reshaped to {tuple(new_shape)}: of "
                f"axes {old}, elements that share a scale would lie apart in axes "
                f"{new}. Reshape the result of .dequant() instead"
            )
        for axis, count in zip(new, found, strict=True):
            counts[axis] = count
    return tuple(counts)


def _pieces(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[Shape, Shape]]:
    """Pairs the smallest groups of old and new axes that a reshape maps to each other.

    Axes of size 1 are left out.
    """
    if 0 in old:
        raise ValueError(
            f"an empty QTensor of shape {tuple(old)} cannot be reshaped to "
            f"{tuple(new)}; reshape the result of .dequant() instead"
        )
    olds = [axis for axis, size in enumerate(old) if size != 1]
    news = [axis for axis, size in enumerate(new) if size != 1]
    while olds:
        left, right = [olds.pop(0)], [news.pop(0)]
        while (a := math.prod(old[i] for i in left)) != (
            b := math.prod(new[i] for i in right)
        ):
            if a < b:
                left.append(olds.pop(0))
            else:
                right.append(news.pop(0))
        yield tuple(left), tuple(right)


def _run(sizes: Sequence[int], counts: Sequence[int]) -> int | None:
    """The size of blocks after axes are merged; None if they would not be regular."""
    block, axis = 1, len(sizes) - 1
    while axis >= 0 and counts[axis] == 1:
        block *= sizes[axis]
        axis -= 1
    if axis >= 0:
        block *= sizes[axis] // counts[axis]
    is_regular = all(counts[i] == sizes[i] for i in range(axis))
    return block if is_regular else None


def _cut(sizes: Sequence[int], block: int) -> list[int]:
    """The number of scales along each axis, for blocks of `block`; [] if none fits."""
    counts: list[int] = []
    for size in reversed(sizes):
        if block % size == 0:
            counts.insert(0, 1)
            block //= size
        elif size % block == 0:
            counts.insert(0, size // block)
            block = 1
        else:
            return []
    return counts


def has_blocks(shape: Sequence[int], scale_shape: Sequence[int]) -> bool:
    """Returns True if an array of this shape has blocks of several elements."""
    return any(
        count not in (1, size) for size, count in zip(shape, scale_shape, strict=True)
    )


def split(x: jax.Array, scale_shape: Sequence[int]) -> jax.Array:
    """Splits each axis with blocks into an axis over blocks and one within a block.

    Args:
        x: array of any shape.
        scale_shape: shape of the scale of `x`.
    """
    for axis in reversed(range(x.ndim)):
        if scale_shape[axis] not in (1, x.shape[axis]):
            x = split_axis(x, axis, scale_shape[axis])
    return x


def split_keepdims(x: jax.Array, shape: Sequence[int], first: int = 0) -> jax.Array:
    """Reshapes per-block values to broadcast to a `split` array.

    Args:
        x: per-block values, keepdims, such as a scale.
        shape: shape of the array.
        first: number of leading axes that only `x` has.
    """
    for axis in reversed(range(len(shape))):
        if x.shape[first + axis] not in (1, shape[axis]):
            x = jnp.expand_dims(x, first + axis + 1)
    return x


def merge_keepdims(
    x: jax.Array, shape: Sequence[int], scale_shape: Sequence[int]
) -> jax.Array:
    """Undoes `split_keepdims`.

    Args:
        x: per-block values that `split_keepdims` returned.
        shape: shape of the array.
        scale_shape: shape of the result.
    """
    pairs = enumerate(zip(shape, scale_shape, strict=True))
    cut = [axis for axis, (size, count) in pairs if count not in (1, size)]
    return lax.squeeze(x, [axis + number for number, axis in enumerate(cut, 1)])


def merge(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `split`.

    Args:
        x: array that `split` returned.
        like: array of the shape before `split`, with the sharding of the result.
    """
    return lax.reshape(x, like.shape, out_sharding=explicit_sharding(like))


def repeat(scale: jax.Array, shape: Sequence[int], axes: Sequence[int]) -> jax.Array:
    """Repeats the scales of blocks along some axes, one for each element.

    Args:
        scale: scale of an array, keepdims.
        shape: shape of the array.
        axes: axes along which to repeat.
    """
    for axis in axes:
        count = scale.shape[axis]
        if count not in (1, shape[axis]):
            scale = repeat_axis(scale, axis, shape[axis] // count)
    return scale


def repeat_into(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Repeats per-block values along an axis, so that it can be cut into equal parts.

    Args:
        x: per-block values; of size 1 along the axis if all blocks share one.
        axis: the axis.
        count: number of parts.
    """
    size = x.shape[axis]
    if size == 1 or count == 1 or size % count == 0:
        return x
    return repeat_axis(x, axis, math.lcm(size, count) // size)


def repeat_axis(x: jax.Array, axis: int, times: int) -> jax.Array:
    """Like `jnp.repeat`, but also along an axis that is sharded explicitly."""
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    own_axes = [i for i in range(x.ndim + 1) if i != axis + 1]
    copied = lax.broadcast_in_dim(x, (*before, size, times, *after), own_axes)
    shape = (*before, size * times, *after)
    return lax.reshape(copied, shape, out_sharding=explicit_sharding(x))


def split_axis(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis into an axis over `count` parts and one within a part."""
    pieces = (count, x.shape[axis] // count)
    shape = (*x.shape[:axis], *pieces, *x.shape[axis + 1 :])
    return lax.reshape(x, shape, out_sharding=_sharding_of_parts(x, axis, count))


def _sharding_of_parts(x: jax.Array, axis: int, count: int) -> NamedSharding | None:
    """Shards the axis over parts if they divide evenly, otherwise replicates it."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return None
    spec = spec_of_axes(sharding, x.ndim)
    blocks = None if count % num_devices(sharding, spec[axis]) else spec[axis]
    return sharding.update(spec=(*spec[:axis], blocks, None, *spec[axis + 1 :]))


def merge_with_next(x: jax.Array, axis: int) -> jax.Array:
    """Merges an axis with the next one, which is not sharded."""
    size = x.shape[axis] * x.shape[axis + 1]
    shape = *x.shape[:axis], size, *x.shape[axis + 2 :]
    sharding = explicit_sharding(x)
    if sharding is not None:
        spec = spec_of_axes(sharding, x.ndim)
        sharding = sharding.update(spec=(*spec[: axis + 1], *spec[axis + 2 :]))
    return lax.reshape(x, shape, out_sharding=sharding)


def move_groups(x: jax.Array, source: int, target: int, groups: int) -> jax.Array:
    """Moves groups from the front of one axis to the front of another.

    >>> x = jnp.arange(4)[None]
    >>> move_groups(x, 1, 0, 2).tolist()
    [[0, 1], [2, 3]]
    """
    if groups == 1:
        return x
    shape = list(x.shape)
    shape[source : source + 1] = [groups, shape[source] // groups]
    x = jnp.moveaxis(x.reshape(shape), source, target)
    # The groups now precede the target axis.
    shape = list(x.shape)
    shape[target : target + 2] = [groups * shape[target + 1]]
    return x.reshape(shape)


def cut(
    x: jax.Array, axes: Sequence[int], counts: Sequence[int], groups: int = 1
) -> jax.Array:
    """Cuts axes into tiles, along new leading axes.

    Args:
        x: operand, or a keepdims array such as its scale.
        axes: axes to cut.
        counts: number of tiles along each of `axes`; an axis of one tile is not cut.
        groups: number of groups along each axis; a tile has an equal part of each.

    Returns:
        `x` with a new leading axis for each axis that was cut, of size 1 if the axis
        that was cut had size 1.
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
    x = repeat_into(x, axis, groups * count)
    if groups == 1:
        return jnp.moveaxis(split_axis(x, axis, count), axis, 0)
    x = split_axis(split_axis(x, axis, groups), axis + 1, count)
    return merge_with_next(jnp.moveaxis(x, axis + 1, 0), axis + 1)

"""Shape operations on `QTensor`, under the names that they have in NumPy and JAX.

Each moves stored values and scales; dequantized, its result equals NumPy's of the
dequantized arrays, bit for bit. Where elements that share a scale would need different
scales, it raises and suggests `QTensor.dequant`. Array methods (`reshape`, `transpose`,
`swapaxes`, `squeeze`, indexing) are methods of `QTensor`.

Updating one position of a key-value cache with a scale for each position and head:

>>> import aqtlite, jax, jax.numpy as jnp
>>> from aqtlite import config, numerics
>>> int8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
>>> x = jax.random.normal(jax.random.key(0), (2, 5, 3, 4))
>>> cache = aqtlite.quantize(x, int8, axes=-1)
>>> cache.shape, cache.scale.shape
((2, 5, 3, 4), (2, 5, 3, 1))
>>> cache = dynamic_update_slice(cache, cache[:, :1] , (0, 4, 0, 0))
>>> bool((cache[:, 4].dequant() == cache[:, 0].dequant()).all())
True

Either all operands of an operation carry a gradient (`QTensor.unrounded`), or none:
`QTensor.stop_gradient` removes it from a result that goes into a cache.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import lowering
from aqtlite.qtensor import concatenation, slices, stored_values
from aqtlite.qtensor.qtensor import QTensor, rearrange, rearrange_alike
from aqtlite.shapes import block_shapes
from aqtlite.shapes.block_shapes import from_the_front


def moveaxis(
    q: QTensor, source: int | Sequence[int], destination: int | Sequence[int]
) -> QTensor:
    """Moves axes to other positions, as `jnp.moveaxis`.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> moveaxis(q, 0, 1).scale.shape
    (1, 2)

    Args:
        q: the array.
        source: axes to move.
        destination: new position of each of them.

    Raises:
        ValueError: if an axis is out of range or named twice.
    """
    return rearrange_alike(q, lambda x: jnp.moveaxis(x, source, destination))


def expand_dims(q: QTensor, axis: int | Sequence[int]) -> QTensor:
    """Inserts axes of size 1, as `jnp.expand_dims`.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> expand_dims(q, 1).scale.shape
    (2, 1, 1)
    """
    return rearrange_alike(q, lambda x: jnp.expand_dims(x, axis))


def broadcast_to(q: QTensor, shape: Sequence[int]) -> QTensor:
    """Repeats along axes of size 1 and new leading ones, as `jnp.broadcast_to`.

    The scales are not repeated.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> broadcast_to(q, (4, 2, 3)).scale.shape
    (1, 2, 1)
    """
    new_axes = (1,) * (len(shape) - q.ndim)
    return rearrange(
        q,
        lambda x: jnp.broadcast_to(x, shape),
        lambda x: x.reshape(*new_axes, *x.shape),
    )


def flip(q: QTensor, axis: int | Sequence[int] | None = None) -> QTensor:
    """Reverses axes, as `jnp.flip`.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> bool((flip(q).dequant() == jnp.flip(q.dequant())).all())
    True
    """
    return rearrange_alike(q, lambda x: jnp.flip(x, axis))


def take(q: QTensor, indices: Any, axis: int, *, mode: str | None = None) -> QTensor:
    """Takes elements along an axis, as `jnp.take`, for example rows of an embedding.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> take(q, jnp.array([1, 1, 0]), axis=0).scale.shape
    (3, 1)

    Args:
        q: the array.
        indices: ints of any shape.
        axis: axis with a scale for each element, or one for all elements.
        mode: "clip", "wrap" or "fill", for indices out of range. None: "fill", which
            gives NaN by NaN scales.

    Raises:
        TypeError: if the axis has blocks.
        ValueError: if the axis shares a scale and the mode is "fill".
    """
    q, axis = q.in_own_order(), from_the_front(axis, q.ndim)
    size, count = q.shape[axis], q.scale.shape[axis]
    taken = functools.partial(jnp.take, indices=indices, axis=axis, mode=mode)
    if count == size != 1:
        return rearrange_alike(q, taken)
    if count != 1:
        raise slices.cuts_blocks("take", q, axis)
    if mode not in ("clip", "wrap"):
        raise ValueError(
            f"take along axis {axis} of a QTensor of shape {q.shape}, which shares a "
            "scale: integers have no NaN to stand for an index out of range. Give "
            "mode='clip' or mode='wrap', or take from .dequant()"
        )
    ones = (1,) * np.ndim(indices)
    return rearrange(
        q, taken, lambda x: x.reshape(*x.shape[:axis], *ones, *x.shape[axis + 1 :])
    )


def pad(q: QTensor, pad_width: Any) -> QTensor:
    """Pads with zeros, as `jnp.pad`.

    Along an axis with blocks, only whole blocks can be added.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> pad(q, ((0, 0), (1, 0))).qvalue.tolist()
    [[0, 127, 127, 127], [0, 127, 127, 127]]

    Args:
        q: array on a grid that has a zero.
        pad_width: a number, a pair, or a pair for each axis, as in `jnp.pad`.

    Raises:
        TypeError: if a width is not a whole number of blocks.
        ValueError: if the grid has no zero.
    """
    if q.offset is not None:
        raise ValueError(
            f"pad of a QTensor of shape {q.shape} with zeros, which its offsets may "
            "leave without a code; pad the result of .dequant() instead"
        )
    q = q.in_own_order().on_grid()
    widths = np.broadcast_to(np.asarray(pad_width), (q.ndim, 2)).tolist()
    scale_widths = []
    for axis, (width, block) in enumerate(zip(widths, q.blocks, strict=True)):
        if q.scale.shape[axis] == 1:
            scale_widths.append([0, 0])
        elif any(one % block for one in width):
            raise slices.cuts_blocks("pad", q, axis)
        else:
            scale_widths.append([one // block for one in width])
    padded = rearrange(
        q,
        lambda x: jnp.pad(x, widths),
        lambda x: jnp.pad(x, scale_widths, constant_values=np.ones((), x.dtype)),
    )
    if padded.zero_point is None:
        zero: np.ndarray | None = np.zeros((), q.qvalue.dtype)
        if q.numerics is not None:
            zero = stored_values.zero(q.numerics)
        if zero is None:
            raise ValueError(
                f"pad of a QTensor of shape {q.shape} with zeros, which its grid "
                f"{q.numerics!r} does not have; pad the result of .dequant() instead"
            )
        stored = jnp.pad(q.qvalue, widths, constant_values=zero)
    else:
        zeros = block_shapes.repeat(padded.zero_point, padded.shape, range(q.ndim))
        inside = jnp.pad(jnp.ones(q.shape, bool), widths)
        stored = jnp.where(inside, padded.qvalue, zeros.astype(q.qvalue.dtype))
    return dataclasses.replace(padded, qvalue=stored)


def concatenate(arrays: Sequence[QTensor], axis: int = 0) -> QTensor:
    """Joins along an axis, as `jnp.concatenate`.

    Along an axis with a scale for each element, or with blocks of equal sizes, the
    scales are joined, too. Along an axis that shares a scale in all arrays, the scales
    must be equal: others raise, or become NaN if they are traced (inside `jax.jit`).

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> concatenate([q, q[:1]]).scale.shape, concatenate([q, q], axis=1).scale.shape
    ((3, 1), (2, 1))

    Raises:
        TypeError: if grids, dtypes or ranks differ.
        ValueError: if other axes' sizes, blocks, or shared scales differ.
    """
    qs = concatenation.check_alike("concatenate", arrays)
    axis = from_the_front(axis, qs[0].ndim)
    concatenation.check_other_axes("concatenate", qs, axis)
    sizes = [q.shape[axis] for q in qs]
    counts = [q.scale.shape[axis] for q in qs]
    join = functools.partial(jnp.concatenate, axis=axis)
    if counts == sizes or len({q.blocks[axis] for q in qs}) == 1 != max(counts):
        return concatenation.combine(qs, join, join)
    if set(counts) != {1}:
        raise ValueError(
            f"concatenate along axis {axis}: blocks of {[q.blocks[axis] for q in qs]} "
            "elements with a scale each do not join; concatenate the results of "
            ".dequant() instead"
        )
    joined = concatenation.combine(qs, join, lambda xs: xs[0])
    for other in qs[1:]:
        joined = concatenation.with_equal(
            f"concatenate along axis {axis}", joined, qs[0], other
        )
    return joined


def stack(arrays: Sequence[QTensor], axis: int = 0) -> QTensor:
    """Joins along a new axis, as `jnp.stack`; each array keeps its scales.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> stack([q, q]).scale.shape
    (2, 2, 1)

    Args:
        arrays: arrays of equal shapes, with scales of equal shapes, on one grid.
        axis: position of the new axis.

    Raises:
        TypeError: if grids, dtypes or ranks differ.
        ValueError: if shapes differ, or if there are no arrays.
    """
    qs = concatenation.check_alike("stack", arrays)
    for q in qs[1:]:
        if (q.shape, q.scale.shape) != (qs[0].shape, qs[0].scale.shape):
            raise ValueError(
                f"stack of QTensors of shapes {qs[0].shape} and {q.shape} with scales "
                f"of shapes {qs[0].scale.shape} and {q.scale.shape}: they must be "
                "equal; stack the results of .dequant() instead"
            )
    join = functools.partial(jnp.stack, axis=axis)
    return concatenation.combine(qs, join, join)


def dynamic_slice(
    q: QTensor, start_indices: Sequence[Any], slice_sizes: Sequence[int]
) -> QTensor:
    """Slices from indices that may be traced, as `jax.lax.dynamic_slice`.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> dynamic_slice(q, (1, 0), (1, 2)).scale.shape
    (1, 1)

    Raises:
        TypeError: if the slice takes a part of an axis with blocks.
        ValueError: unless each axis has one index and one size.
    """
    q = q.in_own_order()
    slices.check_each_axis("dynamic_slice", q, start_indices, slice_sizes)
    sizes = []
    for axis, size in enumerate(slice_sizes):
        count = q.scale.shape[axis]
        if count not in (1, q.shape[axis]) and size != q.shape[axis]:
            raise slices.cuts_blocks("dynamic_slice", q, axis)
        sizes.append(size if count == q.shape[axis] else count)
    starts = slices.scale_starts(q, start_indices)
    return rearrange(
        q,
        lambda x: lax.dynamic_slice(x, start_indices, slice_sizes),
        lambda x: lax.dynamic_slice(x, starts, sizes),
    )


def dynamic_index_in_dim(
    q: QTensor, index: Any, axis: int = 0, keepdims: bool = True
) -> QTensor:
    """Takes one element of an axis, as `jax.lax.dynamic_index_in_dim`.

    >>> from aqtlite import config, quantize
    >>> q = quantize(jnp.ones((2, 3)), config.weight_only().fwd.rhs, axes=1)
    >>> dynamic_index_in_dim(q, 1).scale.shape
    (1, 1)

    Args:
        q: the array.
        index: an int, which may be traced; clamped if it is out of range.
        axis: the axis.
        keepdims: whether to keep the axis, with size 1.

    Raises:
        ValueError: if the axis is out of range.
    """
    q, axis = q.in_own_order(), from_the_front(axis, q.ndim)
    size = q.shape[axis]
    index = jnp.asarray(index)
    index = jnp.clip(jnp.where(index < 0, index + size, index), 0, size - 1)
    taken = q[(*(slice(None),) * axis, index)]
    return expand_dims(taken, axis) if keepdims else taken


def dynamic_update_slice(
    q: QTensor, update: QTensor, start_indices: Sequence[Any]
) -> QTensor:
    """Replaces a slice, as `jax.lax.dynamic_update_slice`, in place where XLA can.

    Along axes with a scale for each element, the scales are replaced, too, and a scale
    that the update shares there is repeated. Along axes that share a scale, the update
    must cover the whole axis or have the scales that it overwrites: others raise, or
    become NaN if they are traced (inside `jax.jit`).

    Args:
        q: array to update, such as a cache; the result has its order of storage.
        update: array on the same grid, not larger along any axis.
        start_indices: ints, which may be traced, one for each axis.

    Raises:
        TypeError: if grids, dtypes or ranks differ, or if the update takes a part of an
            axis with blocks.
        ValueError: if scales differ, or unless each axis has one index.
    """
    slices.check_each_axis("dynamic_update_slice", q, start_indices)
    is_alike = isinstance(update, QTensor) and q.ndim == update.ndim
    if is_alike and q.order is not None and len(q.order) == q.ndim:
        stored = dataclasses.replace(q, order=None)
        piece = dataclasses.replace(update.stored_in(q.order), order=None)
        starts = [start_indices[axis] for axis in q.order]
        updated = dynamic_update_slice(stored, piece, starts)
        return dataclasses.replace(updated, order=q.order)
    q, update = concatenation.check_alike("dynamic_update_slice", (q, update))
    starts = slices.scale_starts(q, start_indices)
    sizes, is_whole = [], True
    for axis, size in enumerate(q.shape):
        count, new = q.scale.shape[axis], update.shape[axis]
        if count == size != 1:
            if update.scale.shape[axis] not in (1, new):
                raise slices.cuts_blocks("dynamic_update_slice", update, axis)
            sizes.append(new)
        elif new != size and count != 1:
            raise slices.cuts_blocks("dynamic_update_slice", q, axis)
        elif update.scale.shape[axis] != count:
            raise ValueError(
                f"dynamic_update_slice: along axis {axis} the update has "
                f"{update.scale.shape[axis]} scales for {new} elements, and the "
                f"QTensor has {count} for {size}; quantize both alike"
            )
        else:
            sizes.append(count)
            is_whole = is_whole and new == size

    def on_scales(xs: Sequence[Any]) -> Any:
        new = jnp.broadcast_to(xs[1], sizes)
        return lowering.update_slice(xs[0], new, starts)

    updated = concatenation.combine(
        (q, update),
        lambda xs: lowering.update_slice(xs[0], xs[1], start_indices),
        on_scales if is_whole else lambda xs: xs[0],
    )
    if is_whole:
        return updated
    there = rearrange(q, lambda x: x, lambda x: lax.dynamic_slice(x, starts, sizes))
    return concatenation.with_equal("dynamic_update_slice", updated, there, update)

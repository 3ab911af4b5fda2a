"""Equations that move elements without changing them."""

import math
from collections.abc import Sequence

import numpy as np

from aqtlite.edge.operators.layout import (
    BroadcastTo,
    Concatenate,
    Pad,
    Reshape,
    Take,
)
from aqtlite.edge.translation.base import Context, NotTranslatable, Translation


def _in_shape(ctx: Context) -> Sequence[int]:
    return [ctx.reshape(ctx.inputs[0], ctx.shape(ctx.node.output))]


def _reshape(ctx: Context) -> Sequence[int]:
    if ctx.params.get("dimensions") is not None:
        raise NotTranslatable("it reshapes axes in another order; transpose first")
    return _in_shape(ctx)


def _transpose(ctx: Context) -> Sequence[int]:
    return [ctx.transpose(ctx.inputs[0], ctx.params["permutation"])]


def _broadcast_in_dim(ctx: Context) -> Sequence[int]:
    (x, *_), shape = ctx.inputs, ctx.shape(ctx.node.output)
    in_place = [1] * len(shape)
    for size, axis in zip(
        ctx.shape(x), ctx.params["broadcast_dimensions"], strict=True
    ):
        in_place[axis] = size
    x = ctx.reshape(x, in_place)
    return [x if tuple(in_place) == shape else ctx.add(BroadcastTo(shape), x)]


def _slice(ctx: Context) -> Sequence[int]:
    bounds = (ctx.params[k] for k in ("start_indices", "limit_indices", "strides"))
    return [ctx.slice(ctx.inputs[0], *bounds)]


def _dynamic_slice(ctx: Context) -> Sequence[int]:
    starts = []
    for index in range(1, len(ctx.inputs)):
        start = ctx.uniform(index)
        if start is None:
            raise NotTranslatable("it slices at an index that is computed")
        starts.append(start)
    shape, sizes = ctx.shape(ctx.inputs[0]), ctx.params["slice_sizes"]
    begin = [
        int(np.clip(start, 0, whole - size))
        for start, whole, size in zip(starts, shape, sizes, strict=True)
    ]
    limit = [a + b for a, b in zip(begin, sizes, strict=True)]
    return [ctx.slice(ctx.inputs[0], begin, limit)]


def _split(ctx: Context) -> Sequence[int]:
    (x,), axis = ctx.inputs, ctx.params["axis"]
    shape, start, made = ctx.shape(x), 0, []
    for size in ctx.params["sizes"]:
        begin, limit = [0] * len(shape), list(shape)
        begin[axis], limit[axis] = start, start + size
        made.append(ctx.slice(x, begin, limit))
        start += size
    return made


def _pad(ctx: Context) -> Sequence[int]:
    widths = ctx.params["padding_config"]
    if ctx.uniform(1) != 0:
        raise NotTranslatable("it pads with another number than zero")
    if any(interior for _, _, interior in widths):
        raise NotTranslatable("it pads between elements")
    (x, _), shape = ctx.inputs, ctx.shape(ctx.inputs[0])
    start = [max(-low, 0) for low, _, _ in widths]
    limit = [n - max(-high, 0) for n, (_, high, _) in zip(shape, widths, strict=True)]
    x = ctx.slice(x, start, limit)
    pairs = tuple((max(low, 0), max(high, 0)) for low, high, _ in widths)
    return [ctx.add(Pad(pairs), x) if any(map(any, pairs)) else x]


def _concatenate(ctx: Context) -> Sequence[int]:
    """Joins what has elements: runtimes refuse, or misread, arrays of none."""
    axis = ctx.params["dimension"]
    parts = [x for x in ctx.inputs if ctx.shape(x)[axis]] or list(ctx.inputs)
    return parts if len(parts) == 1 else [ctx.add(Concatenate(axis), *parts)]


def _stack(ctx: Context) -> Sequence[int]:
    axis, parts = ctx.params["axis"], []
    for x in ctx.inputs:
        shape = list(ctx.shape(x))
        shape.insert(axis, 1)
        parts.append(ctx.reshape(x, shape))
    return [ctx.add(Concatenate(axis), *parts)]


def _tile(ctx: Context) -> Sequence[int]:
    (x,) = ctx.inputs
    for axis, count in enumerate(ctx.params["reps"]):
        if count > 1:
            x = ctx.add(Concatenate(axis), *[x] * count)
    return [x]


def _rev(ctx: Context) -> Sequence[int]:
    (x,) = ctx.inputs
    for axis in ctx.params["dimensions"]:
        backwards = np.arange(ctx.shape(x)[axis], dtype=np.int32)[::-1]
        x = ctx.add(Take(axis), x, ctx.builder.constant(backwards))
    return [x]


def _gather(ctx: Context) -> Sequence[int]:
    """A gather of whole slices along one axis, as in `jnp.take`."""
    x, indices = ctx.inputs
    dims, sizes = ctx.params["dimension_numbers"], ctx.params["slice_sizes"]
    shape = ctx.shape(x)
    batched = getattr(dims, "operand_batching_dims", ())
    if len(dims.start_index_map) != 1 or batched:
        raise NotTranslatable(
            "it gathers along several axes at once: write it with jnp.take"
        )
    (axis,) = dims.start_index_map
    rank = len(ctx.shape(indices)) - 1
    whole = all(sizes[i] == n for i, n in enumerate(shape) if i != axis)
    expected = (*range(axis), *range(axis + rank, len(shape) - 1 + rank))
    if (
        not whole
        or sizes[axis] != 1
        or tuple(dims.collapsed_slice_dims) != (axis,)
        or tuple(dims.offset_dims) != expected
    ):
        raise NotTranslatable(
            "it gathers other things than whole slices along one axis: write it with "
            "jnp.take"
        )
    indices = ctx.add(Reshape(ctx.shape(indices)[:-1]), indices)
    if math.prod(ctx.shape(indices)) == 0:
        raise NotTranslatable("it gathers nothing")
    return [ctx.add(Take(axis), x, indices)]


TRANSLATIONS: dict[str, Translation] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "expand_dims": _in_shape,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "squeeze": _in_shape,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
}

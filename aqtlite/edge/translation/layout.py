"""Equations that move elements."""

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
from aqtlite.edge.translation.base import NotTranslatable, Site, Translation


def _in_shape(site: Site) -> Sequence[int]:
    return [site.reshape(site.inputs[0], site.shape(site.node.output))]


def _reshape(site: Site) -> Sequence[int]:
    if site.params.get("dimensions") is not None:
        raise NotTranslatable("it reshapes axes in another order; transpose first")
    return _in_shape(site)


def _transpose(site: Site) -> Sequence[int]:
    return [site.transpose(site.inputs[0], site.params["permutation"])]


def _broadcast_in_dim(site: Site) -> Sequence[int]:
    (x, *_), shape = site.inputs, site.shape(site.node.output)
    in_place = [1] * len(shape)
    for size, axis in zip(
        site.shape(x), site.params["broadcast_dimensions"], strict=True
    ):
        in_place[axis] = size
    x = site.reshape(x, in_place)
    return [x if tuple(in_place) == shape else site.add(BroadcastTo(shape), x)]


def _slice(site: Site) -> Sequence[int]:
    bounds = (site.params[k] for k in ("start_indices", "limit_indices", "strides"))
    return [site.slice(site.inputs[0], *bounds)]


def _dynamic_slice(site: Site) -> Sequence[int]:
    starts = []
    for index in range(1, len(site.inputs)):
        start = site.uniform(index)
        if start is None:
            raise NotTranslatable("it slices at an index that is computed")
        starts.append(start)
    shape, sizes = site.shape(site.inputs[0]), site.params["slice_sizes"]
    begin = [
        int(np.clip(start, 0, whole - size))
        for start, whole, size in zip(starts, shape, sizes, strict=True)
    ]
    limit = [a + b for a, b in zip(begin, sizes, strict=True)]
    return [site.slice(site.inputs[0], begin, limit)]


def _split(site: Site) -> Sequence[int]:
    (x,), axis = site.inputs, site.params["axis"]
    shape, start, made = site.shape(x), 0, []
    for size in site.params["sizes"]:
        begin, limit = [0] * len(shape), list(shape)
        begin[axis], limit[axis] = start, start + size
        made.append(site.slice(x, begin, limit))
        start += size
    return made


def _pad(site: Site) -> Sequence[int]:
    widths = site.params["padding_config"]
    if site.uniform(1) != 0:
        raise NotTranslatable("it pads with another number than zero")
    if any(interior for _, _, interior in widths):
        raise NotTranslatable("it pads between elements")
    (x, _), shape = site.inputs, site.shape(site.inputs[0])
    start = [max(-low, 0) for low, _, _ in widths]
    limit = [n - max(-high, 0) for n, (_, high, _) in zip(shape, widths, strict=True)]
    x = site.slice(x, start, limit)
    pairs = tuple((max(low, 0), max(high, 0)) for low, high, _ in widths)
    return [site.add(Pad(pairs), x) if any(map(any, pairs)) else x]


def _concatenate(site: Site) -> Sequence[int]:
    return [site.add(Concatenate(site.params["dimension"]), *site.inputs)]


def _stack(site: Site) -> Sequence[int]:
    axis, parts = site.params["axis"], []
    for x in site.inputs:
        shape = list(site.shape(x))
        shape.insert(axis, 1)
        parts.append(site.reshape(x, shape))
    return [site.add(Concatenate(axis), *parts)]


def _tile(site: Site) -> Sequence[int]:
    (x,) = site.inputs
    for axis, count in enumerate(site.params["reps"]):
        if count > 1:
            x = site.add(Concatenate(axis), *[x] * count)
    return [x]


def _rev(site: Site) -> Sequence[int]:
    (x,) = site.inputs
    for axis in site.params["dimensions"]:
        backwards = np.arange(site.shape(x)[axis], dtype=np.int32)[::-1]
        x = site.add(Take(axis), x, site.builder.constant(backwards))
    return [x]


def _gather(site: Site) -> Sequence[int]:
    """A gather of whole slices along one axis, as `jnp.take` makes it."""
    x, indices = site.inputs
    dims, sizes = site.params["dimension_numbers"], site.params["slice_sizes"]
    shape = site.shape(x)
    batched = getattr(dims, "operand_batching_dims", ())
    if len(dims.start_index_map) != 1 or batched:
        raise NotTranslatable(
            "it gathers along several axes at once: write it with jnp.take"
        )
    (axis,) = dims.start_index_map
    rank = len(site.shape(indices)) - 1
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
    indices = site.add(Reshape(site.shape(indices)[:-1]), indices)
    if math.prod(site.shape(indices)) == 0:
        raise NotTranslatable("it gathers nothing")
    return [site.add(Take(axis), x, indices)]


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

"""Indices of an array with blocks, and those of its scales."""

from typing import Any

import jax.numpy as jnp


def entries(
    index: Any, shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the entries of an index into the values, and of one into the scales.

    Args:
        index: ints, slices, None and Ellipsis.
        shape: shape of the array.
        scale_shape: shape of its scales.

    Raises:
        TypeError: for arrays and lists of indices, and along an axis of several blocks.
        IndexError: for more indices than axes, or a Python int out of range.
    """
    values = _expand_index(index, len(shape))
    scales: list[Any] = []
    axis = 0
    for entry in values:
        if entry is None:
            scales.append(None)
            continue
        size, count = shape[axis], scale_shape[axis]
        if isinstance(entry, int) and not -size <= entry < size:
            raise IndexError(
                f"index {entry} is out of range for axis {axis} of size {size}"
            )
        scales.append(_scale_index(entry, size, count))
        if scales[-1] is None:
            raise TypeError(
                f"axis {axis} of a QTensor of shape {shape} has {count} "
                f"blocks of {size // count} elements with a scale each, and "
                f"{entry} cuts through them; index the result of .dequant() instead"
            )
        axis += 1
    return values, tuple(scales)


def _expand_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """Expands an index to one entry per axis, and a None for each new axis."""
    entries = index if isinstance(index, tuple) else (index,)
    for entry in entries:
        is_int = (
            hasattr(entry, "dtype")
            and entry.ndim == 0
            and jnp.issubdtype(entry.dtype, jnp.integer)
        ) or (isinstance(entry, int) and not isinstance(entry, bool))
        if not (is_int or entry is None or entry is Ellipsis) and not isinstance(
            entry, slice
        ):
            raise TypeError(
                "a QTensor takes ints, slices, None and Ellipsis as indices; got "
                f"{entry!r}. Index the result of .dequant() instead"
            )
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if named > ndim or sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError(f"index {index!r} does not fit an array of {ndim} axes")
    rest = (slice(None),) * (ndim - named)
    if not any(entry is Ellipsis for entry in entries):
        return entries + rest
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    return entries[:at] + rest + entries[at + 1 :]


def _scale_index(entry: Any, size: int, count: int) -> Any:
    """Returns the index into the scale for an index into the array, along one axis.

    Args:
        entry: a slice, or an int, which may be traced.
        size: size of the axis.
        count: number of scales along the axis.

    Returns:
        A slice or an int; None if a slice takes parts of several blocks.
    """
    if count == size and size != 1:
        return entry
    if count == 1:
        return slice(None) if isinstance(entry, slice) else 0
    block = size // count
    if not isinstance(entry, slice):
        return entry // block
    taken = range(*entry.indices(size))
    if not taken:
        return slice(0, 0)
    first, last = sorted((taken[0], taken[-1]))
    if first // block == last // block:
        return slice(first // block, first // block + 1)
    if abs(taken.step) != 1 or first % block or (last + 1) % block:
        return None
    blocks = slice(first // block, last // block + 1)
    if taken.step == 1:
        return blocks
    return slice(blocks.stop - 1, blocks.start - 1 if blocks.start else None, -1)

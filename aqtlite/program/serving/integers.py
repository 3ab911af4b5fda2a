"""Integers of a quantized source, handed over where a weight is only moved.

The program that a model quantizes a weight with may transpose, reshape and stack it.
If it does no more (`movement`), the weight's integers are moved likewise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import IntAffine, IntSymmetric
from aqtlite.program.serving import movement
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import double_scales


def handed_over(
    wanted: QTensor,
    sources: Sequence[QTensor],
    prepared: Callable[..., Any],
) -> QTensor | None:
    """Gives a frozen weight the integers of its sources.

    Args:
        wanted: the weight that the model's config makes; shapes in place of arrays do.
        sources: the quantized arrays that it is made of.
        prepared: function from arrays like the sources, in float32, to what the model
            quantizes, in the weight's order of storage.

    Returns:
        The weight with the sources' integers; None if the model has another grid or
        other blocks, or does more with the arrays than moving them.
    """
    order = wanted.order
    wanted = jax.eval_shape(QTensor.as_stored, wanted)
    sources = [_like(wanted, one.in_own_order()) for one in sources]
    special = [wanted.sums, wanted.padding]
    special += [x for one in sources for x in (one.offset, one.padding)]
    is_special = any(one is not None for one in special)
    if is_special or not all(_is_on_same_grid(wanted, one) for one in sources):
        return None
    shapes = [one.shape for one in sources]
    moved = movement.of_program(prepared, shapes, wanted.shape)
    if moved is None:
        return None
    fields: dict[str, Any] = {}
    for name in ("scale", "zero_point"):
        if getattr(wanted, name) is None:
            continue
        every = moved([_of_each(getattr(one, name), one.shape) for one in sources])
        found = _by_block(every, wanted.scale.shape)
        if found is None:
            return None
        fields[name] = jnp.asarray(found)
    values = moved([_on_grid(one) for one in sources])
    stored = stored_values.to_save(jnp.asarray(values), wanted.numerics)
    given = dataclasses.replace(wanted, order=order, qvalue=stored, **fields)
    if isinstance(wanted.scale, QTensor):
        given = double_scales.encoded_like(given, wanted.scale)
    return given


def _on_grid(q: QTensor) -> np.ndarray:
    return np.asarray(_on_grid_in_jax(q))


def _on_grid_in_jax(q: QTensor) -> jax.Array:
    return stored_values.on_grid(jnp.asarray(q.qvalue), q.numerics)


def _like(wanted: QTensor, source: QTensor) -> QTensor:
    """Returns a source with the zero points and the sign that an affine grid has."""
    a, b = wanted.numerics, source.numerics
    if not (isinstance(a, IntAffine) and isinstance(b, IntAffine)):
        return source
    zero = source.zero_point
    if zero is None and wanted.zero_point is not None:
        zero = np.zeros(np.shape(source.scale), np.int32)
        source = dataclasses.replace(source, zero_point=zero)
    if a.signed == b.signed or a.bits != b.bits or zero is None:
        return source
    shift = 2 ** (a.bits - 1) * (-1 if a.signed else 1)
    values = _on_grid(source).astype(np.int16) + shift
    return dataclasses.replace(
        source,
        qvalue=values.astype(a.storage_dtype),
        zero_point=np.asarray(zero) + shift,
        numerics=dataclasses.replace(b, signed=a.signed),
    )


def _is_on_same_grid(a: QTensor, b: QTensor) -> bool:
    """Whether stored values stand for the same numbers, up to scales."""
    dtypes = [jax.eval_shape(_on_grid_in_jax, one).dtype for one in (a, b)]
    if dtypes[0] != dtypes[1]:
        return False
    if (a.zero_point is None) != (b.zero_point is None):
        return False
    if a.numerics == b.numerics:
        return True
    return all(map(_are_plain_integers, (a, b))) and _holds(a, np.asarray(b.qvalue))


def _are_plain_integers(q: QTensor) -> bool:
    grid = q.numerics
    if q.zero_point is not None:
        return False
    if isinstance(grid, IntSymmetric):
        return grid.unit == 1
    return grid is None or (isinstance(grid, IntAffine) and grid.signed)


def _holds(q: QTensor, values: np.ndarray) -> bool:
    """Whether the grid of plain integers has these values."""
    most = jnp.iinfo(q.qvalue.dtype).max
    largest = most if q.numerics is None else q.numerics.largest_stored
    smallest = -most - 1 if largest == most else -largest
    wide = values.astype(np.int8)
    return bool(smallest <= wide.min(initial=0) and wide.max(initial=0) <= largest)


def _of_each(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Scales or zero points of each element of an array of some shape."""
    every = np.asarray(values)
    for axis, size in enumerate(shape):
        every = np.repeat(every, size // every.shape[axis], axis)
    return every


def _by_block(every: np.ndarray, counts: tuple[int, ...]) -> np.ndarray | None:
    """Scales or zero points of blocks; None if elements of a block have several.

    Args:
        every: those of each element of the weight.
        counts: numbers of blocks along each axis.
    """
    split = [
        part
        for size, count in zip(every.shape, counts, strict=True)
        for part in (count, size // count)
    ]
    blocks = every.reshape(split)
    within = tuple(range(1, 2 * len(counts), 2))
    first = np.expand_dims(blocks[(slice(None), 0) * len(counts)], within)
    return first.reshape(counts) if (blocks == first).all() else None

"""Integers of a quantized source, handed over where a weight is only moved.

The program that a model quantizes a weight with may transpose, reshape and stack it.
What it does is found by running it on the places of elements: if each place comes out
once, the weight is only moved, and so are its integers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import IntAffine, IntSymmetric
from aqtlite.program.serving.conversion import FrozenWeight
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes

_BASE = 256
"""Digits of places that every float dtype of a model holds, bfloat16 included."""


def handed_over(
    made: FrozenWeight,
    source: QTensor,
    prepared: Callable[[np.ndarray], np.ndarray],
) -> FrozenWeight | None:
    """Gives a frozen weight the integers of its source.

    Args:
        made: the weight, rounded by the config of the model.
        source: the quantized weight that it was made of.
        prepared: function from a weight like the source, in float32, to what the model
            quantizes.

    Returns:
        The weight with the source's integers; None if the model has another grid or
        other blocks, or does more with the weight than moving it.
    """
    wanted = made.qtensor.in_own_order()
    source = _with_sign_of(wanted, source.in_own_order())
    special = (wanted.sums, wanted.padding, source.offset, source.padding, made.damping)
    if any(one is not None for one in special) or not _is_on_same_grid(wanted, source):
        return None
    places = _places(source.shape, wanted.shape, prepared)
    if places is None:
        return None
    fields: dict[str, Any] = {}
    for name in ("scale", "zero_point"):
        values = getattr(source, name)
        if values is not None:
            found = _by_block(np.asarray(values), source.shape, places, wanted.scale)
            if found is None:
                return None
            fields[name] = found
    values = _on_grid(source).reshape(-1)[places]
    stored = stored_values.to_save(jnp.asarray(values))
    given = dataclasses.replace(wanted, qvalue=stored, **fields)
    if made.qtensor.order is not None:
        given = given.stored_in(made.qtensor.order)
    return made._replace(qtensor=given, noise=jnp.zeros_like(made.noise))


def _on_grid(q: QTensor) -> np.ndarray:
    return np.asarray(stored_values.on_grid(jnp.asarray(q.qvalue), q.numerics))


def _with_sign_of(wanted: QTensor, source: QTensor) -> QTensor:
    """Shifts integers and zero points where one grid is signed, and the other not."""
    a, b = wanted.numerics, source.numerics
    if not (isinstance(a, IntAffine) and isinstance(b, IntAffine)):
        return source
    zero = source.zero_point
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
    if _on_grid(a).dtype != _on_grid(b).dtype:
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


def _places(
    shape: tuple[int, ...],
    wanted: tuple[int, ...],
    prepared: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray | None:
    """Where in the source, flattened, elements come from; None if they are changed."""
    size = math.prod(shape)
    if size != math.prod(wanted):
        return None
    found = np.zeros(wanted, np.int64)
    ours, unit = np.arange(size).reshape(shape), 1
    while unit < size:
        digits = np.asarray(prepared((ours // unit % _BASE).astype(np.float32)))
        if digits.shape != wanted:
            return None
        rounded = np.rint(digits.astype(np.float32))
        if not (rounded == digits).all() or rounded.min() < 0:
            return None
        found += rounded.astype(np.int64) * unit
        unit *= _BASE
    is_permutation = (
        found.max() < size
        and (np.bincount(found.reshape(-1), minlength=size) == 1).all()
    )
    return found if is_permutation else None


def _by_block(
    values: np.ndarray, shape: tuple[int, ...], places: np.ndarray, like: np.ndarray
) -> np.ndarray | None:
    """Moves scales or zero points; None if elements of a block have several.

    Args:
        values: those of the source.
        shape: shape of the source.
        places: from `_places`.
        like: an array with one element for each block.
    """
    axes = range(len(shape))
    every = np.asarray(block_shapes.repeat(jnp.asarray(values), shape, axes))
    every = np.broadcast_to(every, shape).reshape(-1)[places]
    counts = like.shape
    split = [
        part
        for size, count in zip(places.shape, counts, strict=True)
        for part in (count, size // count)
    ]
    blocks = every.reshape(split)
    within = tuple(range(1, 2 * len(counts), 2))
    smallest = blocks.min(axis=within)
    return smallest if (blocks.max(axis=within) == smallest).all() else None

"""Integers of a quantized source, handed over where a weight is only moved.

The program that a model quantizes a weight with may transpose, reshape and stack it.
What it does is found by running it on the places of elements: if each place comes out
once, the weight is only moved, and so are its integers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import IntAffine, IntSymmetric
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import double_scales
from aqtlite.shapes import block_shapes


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
    places = _places([one.shape for one in sources], wanted.shape, prepared)
    if places is None:
        return None
    fields: dict[str, Any] = {}
    for name in ("scale", "zero_point"):
        if getattr(wanted, name) is None:
            continue
        every = [_of_each(getattr(one, name), one.shape) for one in sources]
        found = _by_block(np.concatenate(every), places, wanted.scale.shape)
        if found is None:
            return None
        fields[name] = jnp.asarray(found)
    values = np.concatenate([_on_grid(one).reshape(-1) for one in sources])[places]
    stored = stored_values.to_save(jnp.asarray(values))
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
    if jax.eval_shape(_on_grid_in_jax, a).dtype != _on_grid(b).dtype:
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
    shapes: Sequence[tuple[int, ...]],
    wanted: tuple[int, ...],
    prepared: Callable[..., Any],
) -> np.ndarray | None:
    """Where elements come from; None if they are changed, or copied.

    Places go through the function a byte at a time, which every float dtype of a model
    holds, bfloat16 included.

    Args:
        shapes: shapes of the sources, which count flattened, one after the other.
        wanted: shape of the result.
        prepared: as in `handed_over`.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    size = int(ends[-1])

    def run(flat: np.ndarray) -> np.ndarray | None:
        parts = np.split(flat.astype(np.float32), ends[:-1])
        given = [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
        made = np.asarray(prepared(*given)).astype(np.float32, copy=False)
        return made if made.shape == wanted else None

    # Weights are large: four bytes for each place, of which each is a digit.
    dtype = np.dtype("<u4" if size <= 2**32 else "<u8")
    ours, found = np.arange(size, dtype=dtype), np.zeros(wanted, dtype)
    of_ours, of_found = (x[..., None].view(np.uint8) for x in (ours, found))
    for digit in range(-(-max(size - 1, 1).bit_length() // 8)):
        made = run(of_ours[:, digit])
        if made is None or not _are_bytes(made):
            return None
        of_found[..., digit] = made
    if found.max() >= size:
        return None
    is_taken = np.zeros(size, bool)
    is_taken[found] = True
    if np.count_nonzero(is_taken) < found.size:
        return None
    # Nothing is added that is zero for these places, such as the first element.
    other = np.random.default_rng(0).integers(1, 256, size, np.uint8)
    made = run(other)
    is_moved = made is not None and np.array_equal(made, other[found])
    return found if is_moved else None


def _are_bytes(x: np.ndarray) -> bool:
    """Whether floats are integers of 8 bits."""
    is_within = x.min(initial=0) >= 0 and x.max(initial=0) <= 255
    return bool(is_within and (np.rint(x) == x).all())


def _of_each(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Scales or zero points of each element of an array of some shape, flattened."""
    every = block_shapes.repeat(jnp.asarray(values), shape, range(len(shape)))
    return np.broadcast_to(every, shape).reshape(-1)


def _by_block(
    every: np.ndarray, places: np.ndarray, counts: tuple[int, ...]
) -> np.ndarray | None:
    """Moves scales or zero points; None if elements of a block have several.

    Args:
        every: those of each element of the sources.
        places: from `_places`.
        counts: numbers of blocks along each axis of the weight.
    """
    split = [
        part
        for size, count in zip(places.shape, counts, strict=True)
        for part in (count, size // count)
    ]
    blocks = every[places].reshape(split)
    within = tuple(range(1, 2 * len(counts), 2))
    smallest = blocks.min(axis=within)
    return smallest if (blocks.max(axis=within) == smallest).all() else None

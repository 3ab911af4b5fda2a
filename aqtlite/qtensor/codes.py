"""Codes of stored values, and the bytes that checkpoints keep of them."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import IntSymmetric, Numerics
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor

LOWEST = {1: 16, 2: 16, 4: 16, 8: 256}
"""Bound of the magnitude of the lowest value, by the width of the code in bits: so int8
holds all values of codes that share a byte, and int16 those of codes of 8 bits."""


class Code(NamedTuple):
    """A binary code of few bits: the value is ``lowest + step * code``."""

    bits: int
    """A width in `LOWEST`."""

    lowest: int
    step: int = 1


def code_of(dtype: Any, grid: object) -> Code | None:
    """Selects the narrowest code of stored values or zero points.

    >>> from aqtlite import numerics
    >>> code_of(jnp.int8, numerics.IntSymmetric(bits=2))
    Code(bits=2, lowest=-1, step=1)
    >>> code_of(jnp.int32, numerics.IntAffine(bits=8, signed=True))
    Code(bits=8, lowest=-128, step=1)

    Args:
        dtype: dtype of the array.
        grid: grid of the values; None if unknown. For a custom grid without a zero
            point, only the dtype counts.

    Returns:
        The code; None for values that are stored as they are, since a code would take
        as many bytes, or there is none.
    """
    dtype, step = np.dtype(dtype), 1
    if _has_other_values(dtype, grid):
        grid = None
    if isinstance(grid, Numerics) and grid.zero_point_range is not None:
        lowest, highest = grid.zero_point_range
    elif type(grid) is IntSymmetric:
        lowest, highest = -grid.largest_stored, grid.largest_stored
        step = 1 if grid.preserve_zero else 2
    elif jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        lowest, highest = int(limits.min), int(limits.max)
    else:
        return None
    count = (highest - lowest) // step + 1
    widths = (
        bits
        for bits, bound in LOWEST.items()
        if count <= 2**bits and abs(lowest) < bound and bits < 8 * dtype.itemsize
    )
    bits = next(widths, None)
    return None if bits is None else Code(bits, lowest, step)


def stored_bytes(values: Any) -> int:
    """Returns the number of bytes that a checkpoint keeps of arrays.

    >>> stored_bytes(jnp.zeros((3, 5), jnp.int4))
    9

    Args:
        values: pytree of arrays or shapes, with `QTensor`s.
    """
    nodes = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, QTensor))
    return sum(map(_bytes_of_node, nodes))


def _bytes_of_node(node: Any) -> int:
    if not isinstance(node, QTensor):
        return _bytes_of(node, None)
    if isinstance(node.qvalue, PackedValues):
        rest = dataclasses.replace(node, qvalue=None)
        return _bytes_of(node.qvalue.panels, None) + _bytes_of_node(rest)
    on_grid = [x for x in (node.qvalue, node.zero_point) if x is not None]
    others = dataclasses.replace(node, qvalue=None, zero_point=None)
    return sum(_bytes_of(x, node.numerics) for x in on_grid) + sum(
        _bytes_of(x, None) for x in jax.tree.leaves(others)
    )


def _bytes_of(x: Any, grid: object) -> int:
    shape, dtype = jnp.shape(x), jax.dtypes.result_type(x)
    code = code_of(dtype, grid) if shape else None
    if code is None:
        return math.prod(shape) * dtype.itemsize
    return math.prod(packed_shape(shape, code.bits, packed_axis(shape, code.bits)))


def packed_axis(shape: tuple[int, ...], bits: int) -> int:
    """Returns the axis along which codes fill bytes: the one that takes fewest bytes.

    Of several, the last.

    >>> packed_axis((64, 32, 3, 3), 4), packed_axis((8, 16), 4)
    (1, 1)

    Args:
        shape: shape of the values, of rank 1 or more.
        bits: width of a code.
    """
    sizes = [math.prod(packed_shape(shape, bits, axis)) for axis in range(len(shape))]
    return max(axis for axis, size in enumerate(sizes) if size == min(sizes))


def packed_shape(shape: tuple[int, ...], bits: int, axis: int) -> tuple[int, ...]:
    """Returns the shape of codes in bytes that they fill along an axis."""
    return (*shape[:axis], -(-shape[axis] * bits // 8), *shape[axis + 1 :])


def _has_other_values(dtype: Any, grid: object) -> bool:
    """True if int4 values hold the bit patterns of a grid stored as uint4.

    Patterns of 0 to 7 are the same values in both.
    """
    stored = grid.storage_dtype if isinstance(grid, Numerics) else None
    if dtype != jnp.int4 or stored != jnp.uint4:
        return False
    values = grid.zero_point_range if isinstance(grid, Numerics) else None
    return values is None or values[1] > int(jnp.iinfo(jnp.int4).max)

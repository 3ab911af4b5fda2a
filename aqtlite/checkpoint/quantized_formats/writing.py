"""What a `QTensor` holds, in the terms of files: integers, zero points, blocks."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base
from aqtlite.numerics import IntAffine, IntSymmetric
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor

EXACT_SCALES = "quantize with scale_dtype='bfloat16', which makes such scales"
"""What to do where a format has scales of 16 bits."""


class Integers(NamedTuple):
    """Signed integers of some bits, around 0, and their zero points."""

    values: np.ndarray
    """int8."""

    bits: int
    zero: np.ndarray | None
    """int32, of the shape of the scale."""


def plain(name: str, q: QTensor) -> QTensor:
    """Returns a weight in its own order of axes, with NumPy arrays.

    Raises:
        CheckpointError: if it is padded or rotated, which no file says, or has a scale
            that is NaN or infinite.
    """
    if q.padding is not None or q.rotation is not None:
        what = "rotated" if q.rotation is not None else "padded to whole blocks"
        raise CheckpointError(f"{name} is {what}, which no file of others can say")
    q = q.in_own_order()
    base.checked_scale(name, np.asarray(q.scale), signed=True)
    return dataclasses.replace(
        q,
        qvalue=np.asarray(stored_values.on_grid(jnp.asarray(q.qvalue), q.numerics)),
        scale=np.asarray(q.scale),
        zero_point=None if q.zero_point is None else np.asarray(q.zero_point),
        offset=None if q.offset is None else np.asarray(q.offset),
        unrounded=None,
        sums=None,
    )


def matrix(name: str, q: QTensor) -> QTensor:
    """Returns `plain` of a weight that is a matrix.

    Raises:
        CheckpointError: as of `plain`, or if it is no matrix, or has a negative scale.
    """
    q = plain(name, q)
    base.checked_scale(name, q.scale)
    if q.ndim != 2:
        raise CheckpointError(f"{name} has the shape {q.shape}, not a matrix's")
    return q


def integers_of(name: str, q: QTensor) -> Integers:
    """Returns the integers of a weight on an integer grid.

    Raises:
        CheckpointError: if the grid is another, or a value does not fit its bits.
    """
    bits = _bits(q)
    if bits is None or q.offset is not None:
        raise CheckpointError(f"{name}, {q!r}, is not on a grid of integers")
    values = q.qvalue.astype(jnp.dtype("int8" if bits <= 4 else q.qvalue.dtype))
    wide = values.astype(np.int16)
    zero = None if q.zero_point is None else q.zero_point.astype(np.int32)
    middle = 2 ** (bits - 1)
    if q.qvalue.dtype.name.startswith("uint"):
        wide = wide - middle
        zero = np.full(q.scale.shape, 0, np.int32) if zero is None else zero
        zero = zero - middle
    for part in (wide, zero):
        if part is None or not part.size:
            continue
        if not -middle <= part.min() <= part.max() < middle:
            raise CheckpointError(
                f"{name}, {q!r}, has values or zero points beyond {bits} bits"
            )
    return Integers(wide.astype(np.int8), bits, zero)


def _bits(q: QTensor) -> int | None:
    if isinstance(q.numerics, IntSymmetric | IntAffine):
        return q.numerics.bits
    if q.numerics is not None:
        return None
    return {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}.get(q.qvalue.dtype.name)


def of_rows(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Repeats scales that all rows share, one for each; None if blocks span rows."""
    wanted = (*shape[:-1], part.shape[-1])
    fits = all(n in (1, m) for n, m in zip(part.shape, wanted, strict=True))
    return np.ascontiguousarray(np.broadcast_to(part, wanted)) if fits else None


def exactly(x: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Converts to a narrower dtype; None if that changes a value."""
    with np.errstate(over="ignore"):
        narrow = x.astype(dtype)
    return narrow if np.array_equal(narrow.astype(np.float32), x) else None


def exponents(scale: np.ndarray) -> np.ndarray | None:
    """E8M0 codes of scales, uint8; None if one is no power of two."""
    mantissa, exponent = np.frexp(scale)
    codes = exponent + 126
    if (mantissa != 0.5).any() or (codes < 0).any() or (codes > 254).any():
        return None
    return codes.astype(np.uint8)

"""Writing of GGUF: Q8_0, Q4_0, Q4_1 and MXFP4, and plain numbers."""

import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aqtlite.checkpoint.arrays import as_bytes
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import bits, gguf, gguf_types, writing
from aqtlite.qtensor.qtensor import QTensor

_BLOCK = 32
_MOST_AXES = 4
_ALIGNMENT = "general.alignment"
_ALIGNMENTS = [2**i for i in range(3, 17)]
"""The format asks for multiples of 8; larger ones than 64 KB would be padding alone."""

_NUMBERS = {kind.name: number for number, kind in gguf_types.TYPES.items()}
_PLAIN = {
    kind.dtype: kind.name
    for kind in gguf_types.TYPES.values()
    if kind.decode is None and kind.dtype is not None
}


class Encoded(NamedTuple):
    """A tensor as a file holds it."""

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


def encode(name: str, x: QTensor | np.ndarray) -> Encoded:
    """Encodes a tensor in the type that holds its integers and scales as they are.

    Raises:
        CheckpointError: if no type does.
    """
    if np.ndim(x) > _MOST_AXES:
        raise CheckpointError(
            f"{name} has {np.ndim(x)} axes, and GGUF has at most {_MOST_AXES}"
        )
    if not isinstance(x, QTensor):
        array = np.asarray(x)
        if array.dtype not in _PLAIN:
            raise CheckpointError(f"{name} is {array.dtype.name}, which GGUF has not")
        return Encoded(_PLAIN[array.dtype], array.shape, array)
    q = writing.plain(name, x)
    if not q.ndim or q.shape[-1] % _BLOCK or q.blocks[-1] % _BLOCK:
        raise CheckpointError(
            f"{name}, {q!r}: GGUF has blocks of {_BLOCK} elements of the last axis"
        )
    if q.numerics == bits.E2M1:
        return _mxfp4(name, q)
    if q.offset is not None:
        return _with_offset(name, q, q.qvalue, q.offset)
    found = writing.integers_of(name, q)
    if found.zero is not None:
        # scale * (code - zero) is scale * code + offset: exact, if the offset is.
        codes = found.values.astype(np.int16) + 2 ** (found.bits - 1)
        zero = found.zero + 2 ** (found.bits - 1)
        return _with_offset(name, q, codes, -(q.scale * zero.astype(np.float32)))
    scale = _halves(name, q, q.scale)
    values = found.values.reshape(-1, _BLOCK)
    if found.bits > 4:
        return Encoded("Q8_0", q.shape, _joined(scale, values.view(np.uint8)))
    nibbles = (values + np.int8(8)).view(np.uint8)
    return Encoded("Q4_0", q.shape, _joined(scale, _packed(nibbles)))


def _mxfp4(name: str, q: QTensor) -> Encoded:
    codes = writing.exponents(_of_blocks(name, q, q.scale))
    if codes is None:
        raise CheckpointError(
            f"{name}, {q!r}: GGUF's fp4 has powers of two as scales (MXFP4)"
        )
    nibbles = bits.e2m1_nibbles(q.qvalue).reshape(-1, _BLOCK)
    plus_zero = np.where(nibbles == 8, np.uint8(0), nibbles)
    return Encoded("MXFP4", q.shape, _joined(codes, _packed(plus_zero)))


def _with_offset(
    name: str, q: QTensor, codes: np.ndarray, offset: np.ndarray
) -> Encoded:
    codes = codes.astype(np.int16).reshape(-1, _BLOCK)
    if codes.size and not 0 <= codes.min() <= codes.max() < 16:
        raise CheckpointError(
            f"{name}, {q!r}: GGUF is written with zero points or offsets in 4 bits "
            "(Q4_1)"
        )
    fields = (_halves(name, q, part) for part in (q.scale, offset))
    nibbles = _packed(codes.astype(np.uint8))
    return Encoded("Q4_1", q.shape, _joined(*fields, nibbles))


def _of_blocks(name: str, q: QTensor, part: np.ndarray) -> np.ndarray:
    """Repeats scales, one for each block of the format; (blocks, 1)."""
    rows = writing.of_rows(part, q.shape)
    if rows is None:
        raise CheckpointError(f"{name}, {q!r}, has blocks over several rows")
    times = q.shape[-1] // _BLOCK // max(rows.shape[-1], 1)
    return rows.repeat(times, -1).reshape(-1, 1)


def _halves(name: str, q: QTensor, part: np.ndarray) -> np.ndarray:
    """Scales or offsets as the bytes of float16."""
    stored = writing.exactly(_of_blocks(name, q, part), np.dtype("float16"))
    if stored is None:
        raise CheckpointError(
            f"{name}: GGUF stores scales, and minus scale times zero point, as "
            f"float16, and these need more: {writing.EXACT_SCALES}; or give weights "
            "no zero points"
        )
    return stored.astype("<f2").view(np.uint8)


def _packed(nibbles: np.ndarray) -> np.ndarray:
    """Joins the two halves of each block, the first in the low nibbles."""
    half = _BLOCK // 2
    return nibbles[:, :half] | (nibbles[:, half:] << 4)


def _joined(*fields: np.ndarray) -> np.ndarray:
    return np.concatenate(fields, axis=1)


def write(
    path: pathlib.Path,
    names: Sequence[str],
    read: Callable[[str], QTensor | np.ndarray],
    metadata: Mapping[str, Any],
) -> None:
    """Writes a new file.

    Args:
        path: the file.
        names: names of the tensors.
        read: reads a tensor; called twice for each, so that one is in memory at a time.
        metadata: key-value pairs: numbers, bools, texts, and lists of them.

    Raises:
        CheckpointError: if a tensor or a value is none of the format.
    """
    alignment = gguf.ALIGNMENT
    if _ALIGNMENT in metadata:
        alignment = _checked_alignment(metadata[_ALIGNMENT])
        metadata = {**metadata, _ALIGNMENT: np.uint32(alignment)}
    header = _header(metadata, len(names))
    position = 0
    for name in names:
        kind, shape, data = encode(name, read(name))
        rank = struct.pack("<I", len(shape))
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += _text(name) + rank + sizes
        header += struct.pack("<IQ", _NUMBERS[kind], position)
        position += _aligned(data.nbytes, alignment)
    with path.open("xb") as file:
        file.write(header)
        file.write(bytes(_aligned(len(header), alignment) - len(header)))
        for name in names:
            data = encode(name, read(name)).data
            file.write(as_bytes(data))
            file.write(bytes(_aligned(data.nbytes, alignment) - data.nbytes))


def _header(metadata: Mapping[str, Any], count: int) -> bytes:
    pairs = [_text(key) + _value(key, value) for key, value in metadata.items()]
    return gguf.MAGIC + struct.pack("<IQQ", 3, count, len(pairs)) + b"".join(pairs)


def _checked_alignment(value: Any) -> int:
    if isinstance(value, int | np.integer) and value in _ALIGNMENTS:
        return int(value)
    raise CheckpointError(
        f"metadata: {_ALIGNMENT} has to be a power of two from {_ALIGNMENTS[0]} to "
        f"{_ALIGNMENTS[-1]}, got {str(value)[:80]}; leave it out for {gguf.ALIGNMENT}"
    )


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _text(text: Any) -> bytes:
    try:
        data = text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise CheckpointError(
            f"GGUF has names and texts in UTF-8, not {text!r:.80}"
        ) from error
    return struct.pack("<Q", len(data)) + data


_KINDS = {np.dtype(dtype): kind for kind, dtype in gguf.SCALARS.items()}


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", gguf.STRING) + _text(value)
    if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value):
        head = struct.pack("<IIQ", gguf.ARRAY, gguf.STRING, len(value))
        return head + b"".join(map(_text, value))
    array = _numbers(key, value)
    if array is None or array.dtype not in _KINDS or array.ndim > 1:
        raise CheckpointError(f"GGUF has no value such as {key}={str(value)[:80]}")
    kind = _KINDS[array.dtype]
    if array.ndim:
        head = struct.pack("<IIQ", gguf.ARRAY, kind, array.size)
    else:
        head = struct.pack("<I", kind)
    return head + array.tobytes()


def _numbers(key: str, value: Any) -> np.ndarray | None:
    """An array of a number or of numbers: of Python's, uint32, int64 and float32."""
    try:
        array = np.asarray(value)
        if isinstance(value, np.ndarray | np.generic):
            return array
        given = np.asarray(value, object)
        are_integers = given.size and all(type(x) is int for x in given.flat)
        if array.dtype == np.float64 and are_integers:
            array = given.astype(np.uint64)  # Some are no int64.
    except (ValueError, OverflowError):
        return None
    if array.dtype == np.float64:
        return _float32(key, array, given)
    if array.dtype == np.int64 and array.size:
        is_uint32 = 0 <= array.min() <= array.max() < 2**32
        return array.astype(np.uint32) if is_uint32 else array
    return array


def _float32(key: str, array: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Fractions are rounded, as llama.cpp reads them; nothing else is changed."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    for old, new in zip(given.flat, narrow.flat, strict=True):
        is_whole = isinstance(old, int) or old.is_integer()
        is_lost = np.isinf(new) != np.isinf(old) or (new == 0 and old != 0)
        if is_lost or (is_whole and float(new) != old):
            raise CheckpointError(
                f"metadata: {key} has {old!r:.40}, which is no float32, as GGUF's "
                "readers ask for; give a NumPy float64 scalar or array to store it in "
                "64 bits"
            )
    return narrow

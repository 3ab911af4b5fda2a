"""GGUF: the container of llama.cpp.

A header, key-value pairs, entries of tensors, and their bytes, aligned. Each length and
offset is checked against the size of the file before it is used. `gguf_types` decodes
the bytes.
"""

import dataclasses
import functools
import math
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, gguf_types
from aqtlite.qtensor.qtensor import QTensor

MAGIC = b"GGUF"
SUFFIX = ".gguf"
ALIGNMENT = 32

STRING = 8
ARRAY = 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""NumPy's dtypes of the types of values."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_LARGEST_RANK = 4


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file: its shape, type, and place."""

    shape: tuple[int, ...]
    kind: gguf_types.Type
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class File:
    """The contents of a file, without its tensors' bytes."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]


def is_file(path: pathlib.Path) -> bool:
    """Whether a file begins as this format does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def without_part(path: pathlib.Path) -> str:
    """The name of a file, without its number in a split."""
    return _SPLIT.sub("", path.name)


def plan(path: pathlib.Path) -> tuple[Mapping[str, base.Weight], Mapping[str, Any]]:
    """Plans the tensors of a file, and of the others of its split.

    Returns:
        The tensors by name, the last axis in rows, as `gguf` gives them; and the
        key-value pairs.

    Raises:
        CheckpointError: if a file is damaged, or has a type that is not read.
    """
    files = [open_file(one) for one in parts(path)]
    plans: dict[str, base.Weight] = {}
    for file in files:
        for name, entry in file.entries.items():
            if name in plans:
                raise CheckpointError(f"{name} is in several parts of {path}")
            plans[name] = base.Weight(
                entry.shape,
                entry.kind.text,
                (name,),
                entry.nbytes,
                functools.partial(_read, file.path, name, entry),
                entry.kind.decoded_dtype,
                entry.kind.decode is not None,
            )
    return plans, files[0].metadata


def parts(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a split, which their names count.

    Raises:
        CheckpointError: if one is missing.
    """
    numbers = _SPLIT.search(path.name)
    if numbers is None:
        return [path]
    stem, count = path.name[: numbers.start()], int(numbers[2])
    names = (f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count))
    files = [path.parent / name for name in names]
    for part in files:
        if not is_file(part):
            raise CheckpointError(
                f"{path} is one of {count} parts, and {part} is missing"
            )
    return files


def _read(path: pathlib.Path, name: str, entry: Entry) -> QTensor | np.ndarray:
    if not entry.nbytes:
        data = np.zeros(0, np.uint8)
    else:
        data = np.memmap(path, np.uint8, "r", entry.start, (entry.nbytes,))
    return gguf_types.decode(name, entry.kind, data, entry.shape)


def open_file(path: pathlib.Path) -> File:
    """Reads the header, the key-value pairs and the entries of a file.

    Raises:
        CheckpointError: if a length or an offset lies outside the file, or a name, a
            type or a shape is not one of the format.
    """
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    cursor = _Cursor(data, str(path))
    if cursor.take(4) != MAGIC:
        raise cursor.damaged("it does not begin with GGUF")
    version = cursor.number("<u4")
    if version not in (2, 3):
        raise cursor.damaged(f"its version is {version}, not 2 or 3 (little-endian)")
    tensors, pairs = cursor.number("<u8"), cursor.number("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(pairs, least=13)):
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged(f"it has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("<u4"))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, no power of two")
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(cursor.count(tensors, least=24)):
        name = cursor.text()
        if name in found:
            raise cursor.damaged(f"it has the tensor {name!r} twice")
        rank = cursor.number("<u4")
        if rank > _LARGEST_RANK:
            raise cursor.damaged(f"{name} has {rank} axes")
        shape = tuple(cursor.number("<u8") for _ in range(rank))[::-1]
        found[name] = shape, cursor.number("<u4"), cursor.number("<u8")
    start = -(-cursor.position // alignment) * alignment
    entries = {
        name: _entry(name, shape, kind, start, offset, alignment, cursor)
        for name, (shape, kind, offset) in found.items()
    }
    _check_apart(entries, cursor)
    return File(path, metadata, entries)


def _entry(
    name: str,
    shape: tuple[int, ...],
    number: int,
    start: int,
    offset: int,
    alignment: int,
    cursor: "_Cursor",
) -> Entry:
    kind = gguf_types.TYPES.get(number)
    if kind is None:
        known = ", ".join(one.name for one in gguf_types.TYPES.values())
        label = gguf_types.NOT_READ.get(number, f"number {number}")
        raise CheckpointError(
            f"{name} in {cursor.where} is of type {label}, which is not read; {known} "
            "are"
        )
    columns = shape[-1] if shape else 1
    if columns % kind.elements:
        raise cursor.damaged(
            f"{name} of shape {list(shape)} has rows that are no blocks of "
            f"{kind.elements} elements ({kind.name})"
        )
    nbytes = math.prod(shape) // kind.elements * kind.nbytes
    if offset % alignment or start + offset + nbytes > cursor.size:
        raise cursor.damaged(
            f"{name} of shape {list(shape)}, {nbytes} bytes at offset {offset}, is not "
            "aligned, or lies outside the file"
        )
    return Entry(shape, kind, start + offset, nbytes)


def _check_apart(entries: Mapping[str, Entry], cursor: "_Cursor") -> None:
    last, end = "", 0
    for name, entry in sorted(entries.items(), key=lambda one: one[1].start):
        if entry.nbytes and entry.start < end:
            raise cursor.damaged(f"{last} and {name} lie on the same bytes")
        if entry.nbytes:
            last, end = name, entry.start + entry.nbytes


class _Cursor:
    """Reads a file from its beginning, within its size."""

    def __init__(self, data: np.ndarray, where: str):
        self._data = data
        self.size = data.size
        self.where = where
        self.position = 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged, or no GGUF file: {what}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.damaged(f"it ends within {count} bytes at {self.position}")
        start, self.position = self.position, self.position + count
        return self._data[start : self.position].tobytes()

    def count(self, number: int, least: int) -> int:
        """Checks that so many things of at least so many bytes fit into the rest."""
        if number * least > self.size - self.position:
            raise self.damaged(f"it is too short for {number} entries")
        return number

    def number(self, dtype: str) -> int:
        codes = {"<u4": "<I", "<u8": "<Q"}
        found: int = struct.unpack(codes[dtype], self.take(int(dtype[2])))[0]
        return found

    def text(self) -> str:
        return self.take(self.number("<u8")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value: a number, a bool, a text, a list of texts, or an array."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("<u4"), self.number("<u8")
            if inner == STRING:
                return [self.text() for _ in range(self.count(count, least=8))]
            return np.frombuffer(
                self.take(count * self._dtype(inner).itemsize), self._dtype(inner)
            )
        dtype = self._dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _dtype(self, kind: int) -> np.dtype:
        if kind not in SCALARS:
            raise self.damaged(f"it has a value of type {kind}, or arrays of arrays")
        return np.dtype(SCALARS[kind])

"""The format of `flax.serialization.to_bytes`, read-only.

Flax writes an array as a msgpack extension, ``(shape, dtype, bytes)``, and splits
arrays of more than 2^30 bytes into chunks.
"""

import functools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, NamedTuple

import msgpack
import numpy as np
from flax import serialization

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import base
from aqtlite.checkpoint.names import name_of
from aqtlite.config.json import json_text

SUFFIX = ".msgpack"
_CHUNKED = "__msgpack_chunked_array__"
_HEADER_BYTES = 4096
_DEPTH = 100  # of nested mappings; no tree of variables is deeper
_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OSError,
    msgpack.UnpackException,
)

# Offset of the payload of an extension, by first byte.
_PAYLOADS = {0xC7: 3, 0xC8: 4, 0xC9: 6} | dict.fromkeys(range(0xD4, 0xD9), 2)
_ARRAYS = (1, 3)  # Flax's extension codes of arrays and NumPy scalars

_Span = tuple[int, int]  # start and stop in the file


class _Entry(NamedTuple):
    info: ArrayInfo
    spans: list[_Span]  # one for each chunk


class MsgpackReader(base.Reader):
    """Reads arrays without loading the whole file. Lists are leaves in `others`."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    @functools.cached_property
    def _contents(self) -> tuple[dict[str, _Entry], dict[str, str]]:
        limit = max(self.path.stat().st_size, 1)
        try:
            with self.path.open("rb") as file, self.path.open("rb") as again:
                unpacker = msgpack.Unpacker(file, max_buffer_size=limit)
                leaves = _unique(_leaves(again, unpacker, ()))
                contents = _contents(again, leaves)
                if unpacker.tell() != limit:
                    raise ValueError(f"{limit - unpacker.tell()} bytes follow its tree")
                return contents
        except _ERRORS as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        why = str(error) or "it ends too early"
        return CheckpointError(
            f"{self.path} is not a whole file of flax.serialization.to_bytes: {why}"
        )

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {name: entry.info for name, entry in self._contents[0].items()}

    @property
    def others(self) -> Mapping[str, str]:
        return self._contents[1]

    def read(self, name: str) -> np.ndarray:
        entry = self._contents[0][name]
        chunks = []
        try:
            with self.path.open("rb") as file:
                for start, stop in entry.spans:
                    file.seek(start)
                    data = file.read(stop - start)
                    chunks.append(serialization.msgpack_restore(data))
        except _ERRORS as error:
            raise self._unreadable(error) from error
        whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        return np.asarray(whole).reshape(entry.info.shape)

    def manifest(self) -> str | None:
        return None

    def files(self) -> list[pathlib.Path]:
        return [self.path]


def _leaves(
    file: IO[bytes], unpacker: msgpack.Unpacker, at: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], _Span]]:
    """Yields the path and the byte span of each leaf of the next mapping."""
    if len(at) > _DEPTH:
        raise ValueError(f"its mappings are nested more than {_DEPTH} levels deep")
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        if not isinstance(key, str):
            raise ValueError(f"the mapping {name_of(at)!r} has a key {key!r}")
        path = (*at, key)
        start = unpacker.tell()
        first = _bytes_at(file, start, 1)[0]
        if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
            yield from _leaves(file, unpacker, path)
        else:
            unpacker.skip()
            yield path, (start, unpacker.tell())


def _unique(
    leaves: Iterator[tuple[tuple[str, ...], _Span]],
) -> dict[tuple[str, ...], _Span]:
    found: dict[tuple[str, ...], _Span] = {}
    for path, span in leaves:
        if path in found:
            raise ValueError(f"it holds {name_of(path)} twice")
        found[path] = span
    return found


def _contents(
    file: IO[bytes], leaves: dict[tuple[str, ...], _Span]
) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Sorts leaves into arrays and others, by name."""
    chunked = {path[:-1] for path in leaves if path[-1] == _CHUNKED}
    arrays = {name_of(path): _chunked(file, leaves, path) for path in chunked}
    parts = {(*path, part) for path in chunked for part in ("shape", "chunks")}
    others: dict[str, str] = {}
    for path, span in leaves.items():
        if path[-1] == _CHUNKED or path[:-1] in parts:
            continue
        name, info = name_of(path), _info(file, span)
        if info is not None:
            arrays[name] = _Entry(info, [span])
        elif (description := _description(file, span)) is not None:
            others[name] = description
    return arrays, others


def _chunked(
    file: IO[bytes], leaves: dict[tuple[str, ...], _Span], path: tuple[str, ...]
) -> _Entry:
    """Assembles the entry of an array that Flax wrote in chunks."""
    shape = tuple(
        msgpack.unpackb(_bytes_at(file, start, stop - start))
        for start, stop in _numbered(leaves, (*path, "shape"))
    )
    spans = _numbered(leaves, (*path, "chunks"))
    infos = [info for info in (_info(file, span) for span in spans) if info]
    sizes = [math.prod(info.shape) for info in infos]
    same = {info.dtype for info in infos} == {infos[0].dtype}
    if sum(sizes) != math.prod(shape) or len(infos) != len(spans) or not same:
        raise ValueError(f"the chunks of {name_of(path)} are not {shape}")
    return _Entry(ArrayInfo(shape, infos[0].dtype), spans)


def _description(file: IO[bytes], span: _Span) -> str | None:
    """Describes a leaf that is not an array; None if the leaf is None."""
    start, stop = span
    if stop - start > _HEADER_BYTES:
        return f"a value of {stop - start} bytes"
    value = msgpack.unpackb(_bytes_at(file, start, stop - start))
    return None if value is None else f"the {type(value).__name__} {value!r:.40}"


def _numbered(leaves: dict[tuple[str, ...], _Span], at: tuple[str, ...]) -> list[_Span]:
    """The entries of a sequence that is stored as a mapping with keys 0, 1, 2, ..."""
    count = sum(path[:-1] == at for path in leaves)
    return [leaves[(*at, str(i))] for i in range(count)]


def _info(file: IO[bytes], span: _Span) -> ArrayInfo | None:
    """Reads the header of an array; None if the value is not an array."""
    start, stop = span
    head = _bytes_at(file, start, min(_HEADER_BYTES, stop - start))
    payload = _PAYLOADS.get(head[0])
    if payload is None or head[payload - 1] not in _ARRAYS:
        return None
    unpacker = msgpack.Unpacker()
    unpacker.feed(head[payload:])
    unpacker.read_array_header()
    shape, dtype = unpacker.unpack(), json_text.dtype(unpacker.unpack())
    info = ArrayInfo(tuple(int(size) for size in shape), dtype)
    if min(info.shape, default=1) < 0 or info.nbytes > stop - start:
        raise ValueError(f"an array of {info} does not fit into {stop - start} bytes")
    return info


def _bytes_at(file: IO[bytes], start: int, count: int) -> bytes:
    file.seek(start)
    found = file.read(count)
    if len(found) < count:
        raise ValueError("it ends too early")
    return found

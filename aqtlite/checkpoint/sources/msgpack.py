"""Files of `flax.serialization.to_bytes`, read without loading them whole.

Flax writes an array as an extension of msgpack, ``(shape, dtype, bytes)``, and one of
more than 2^30 bytes in chunks.
"""

import functools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, NamedTuple

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
from flax import serialization

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.sources import base

SUFFIX = ".msgpack"
_CHUNKED = "__msgpack_chunked_array__"
_HEADER_BYTES = 4096
_ERRORS = (ValueError, TypeError, KeyError, OSError, msgpack.UnpackException)

# Where the payload of an extension starts, by the extension's first byte.
_PAYLOADS = {0xC7: 3, 0xC8: 4, 0xC9: 6} | dict.fromkeys(range(0xD4, 0xD9), 2)
_ARRAYS = (1, 3)  # Flax's extension codes of arrays and of NumPy's scalars

_Span = tuple[int, int]  # start and stop in the file


class _Entry(NamedTuple):
    info: ArrayInfo
    spans: list[_Span]  # of each chunk


class Msgpack(base.Source):
    """One file. Lists are not taken apart: it has to be a tree of dictionaries."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    @functools.cached_property
    def _entries(self) -> dict[str, _Entry]:
        limit = max(self.path.stat().st_size, 1)
        try:
            with self.path.open("rb") as file, self.path.open("rb") as again:
                unpacker = msgpack.Unpacker(file, max_buffer_size=limit)
                return _entries(again, dict(_leaves(again, unpacker, ())))
        except _ERRORS as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        why = str(error) or "it ends too early"
        return CheckpointError(
            f"{self.path} is not a whole file of flax.serialization.to_bytes: {why}"
        )

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {name: entry.info for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
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

    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.device_put(self.read(name), sharding)

    def manifest(self) -> str | None:
        return None

    def files(self) -> list[pathlib.Path]:
        return [self.path]


def _leaves(
    file: IO[bytes], unpacker: msgpack.Unpacker, at: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], _Span]]:
    """Where what is in the mapping that the unpacker stands in front of lies."""
    for _ in range(unpacker.read_map_header()):
        path = (*at, str(unpacker.unpack()))
        start = unpacker.tell()
        first = _bytes_at(file, start, 1)[0]
        if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
            yield from _leaves(file, unpacker, path)
        else:
            unpacker.skip()
            yield path, (start, unpacker.tell())


def _entries(
    file: IO[bytes], leaves: dict[tuple[str, ...], _Span]
) -> dict[str, _Entry]:
    chunked = {path[:-1] for path in leaves if path[-1] == _CHUNKED}
    entries = {}
    for path in chunked:
        shape = [
            msgpack.unpackb(_bytes_at(file, start, stop - start))
            for start, stop in _numbered(leaves, (*path, "shape"))
        ]
        spans = _numbered(leaves, (*path, "chunks"))
        infos = [info for info in (_info(file, span) for span in spans) if info]
        if sum(math.prod(info.shape) for info in infos) != math.prod(shape):
            raise ValueError(f"the chunks of {'/'.join(path)} are not {shape}")
        entries["/".join(path)] = _Entry(ArrayInfo(tuple(shape), infos[0].dtype), spans)
    for path, span in leaves.items():
        info = _info(file, span)
        if info is not None and path[:-2] not in chunked:
            entries["/".join(path)] = _Entry(info, [span])
    return entries


def _numbered(leaves: dict[tuple[str, ...], _Span], at: tuple[str, ...]) -> list[_Span]:
    """The entries 0, 1, 2, ... of a sequence, which Flax writes as a mapping."""
    count = sum(path[:-1] == at for path in leaves)
    return [leaves[(*at, str(i))] for i in range(count)]


def _info(file: IO[bytes], span: _Span) -> ArrayInfo | None:
    """The shape and dtype in front of an array's bytes; None for another value."""
    start, stop = span
    head = _bytes_at(file, start, min(_HEADER_BYTES, stop - start))
    payload = _PAYLOADS.get(head[0])
    if payload is None or head[payload - 1] not in _ARRAYS:
        return None
    unpacker = msgpack.Unpacker()
    unpacker.feed(head[payload:])
    unpacker.read_array_header()
    shape, dtype = unpacker.unpack(), jnp.dtype(unpacker.unpack())
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

"""The safetensors format. Reading needs the package `safetensors`.

A file (https://huggingface.co/docs/safetensors) consists of the length of the header, a
header in JSON, and the bytes of the arrays. Files are written here, array by array,
because the library needs all arrays in memory at once.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray, as_bytes
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import base
from aqtlite.checkpoint.names import name_of, steps_of

SUFFIX = ".safetensors"

_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "/": "%2F"})
_MANIFEST = "aqtlite"
_METADATA = "__metadata__"

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "U16": np.dtype("uint16"),
    "U32": np.dtype("uint32"),
    "BOOL": np.dtype("bool"),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
"""Dtypes by their names in the format. F4 and F6 are missing: the format does not
specify in which order they are packed into bytes."""

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files in a folder."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


class SafetensorsReader(base.Reader):
    """Reads a file or a folder of files. Dots and slashes in names separate levels.

    `SafetensorsWriter` escapes those within a level as in URLs.
    """

    def __init__(self, path: pathlib.Path, files: list[pathlib.Path] | None = None):
        """Reads some files of a folder; None for all."""
        self.path = path
        every = [path] if path.is_file() else files_in(path)
        self._files = every if files is None else files

    @functools.cached_property
    def _entries(self) -> dict[str, tuple[pathlib.Path, str, ArrayInfo | str]]:
        """File, key, and info (or the name of an unknown dtype) of arrays, by name."""
        entries: dict[str, tuple[pathlib.Path, str, ArrayInfo | str]] = {}
        unescape = str if self.manifest() is None else urllib.parse.unquote
        for file in self._files:
            with _opened(file) as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no mapping)
                    part = tensors.get_slice(key)
                    name = name_of(map(unescape, re.split(r"[./]", key)))
                    if name in entries:
                        raise CheckpointError(
                            f"{key} is in {entries[name][0]} and in {file}"
                        )
                    dtype = _DTYPES.get(part.get_dtype())
                    shape = tuple(part.get_shape())
                    info = dtype and ArrayInfo(shape, dtype)
                    entries[name] = file, key, info or part.get_dtype()
        return entries

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        infos = {name: info for name, (_, _, info) in self._entries.items()}
        return {n: info for n, info in infos.items() if isinstance(info, ArrayInfo)}

    @property
    def places(self) -> Mapping[str, tuple[pathlib.Path, str]]:
        """The file that holds each array, and its key there, by name."""
        return {name: (file, key) for name, (file, key, _) in self._entries.items()}

    @property
    def others(self) -> Mapping[str, str]:
        infos = {name: info for name, (_, _, info) in self._entries.items()}
        return {
            name: f"of dtype {dtype}, which is none of {', '.join(_DTYPES)}"
            for name, dtype in infos.items()
            if isinstance(dtype, str)
        }

    def read(self, name: str) -> np.ndarray:
        return self.read_slice(name, ())

    def slices(self, name: str) -> base.Sliceable:
        return _Slices(self, name) if self.arrays[name].shape else self.read(name)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a slice of one array."""
        file, key, _ = self._entries[name]
        info = self.arrays[name]
        with _opened(file) as tensors:
            if info.dtype.name.startswith("float8"):
                # The library uses NumPy's dtypes, which have no float8.
                return np.array(_mapped(file, key, info)[index])
            x = tensors.get_slice(key)[index] if index else tensors.get_tensor(key)
            return np.asarray(x).astype(info.dtype, copy=False)

    def manifest(self) -> str | None:
        for file in self._files:
            with _opened(file) as tensors:
                text = (tensors.metadata() or {}).get(_MANIFEST)
            if text is not None:
                return text
        return None

    def files(self) -> list[pathlib.Path]:
        return self._files


def _mapped(file: pathlib.Path, key: str, info: ArrayInfo) -> np.ndarray:
    """Memory-maps one array of a file that the library has validated."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        start, stop = json.loads(opened.read(size))[key]["data_offsets"]
    if start == stop:
        return np.zeros(info.shape, info.dtype)
    data = np.memmap(file, np.uint8, "r", 8 + size + start, info.shape)
    return data.view(info.dtype)


@dataclasses.dataclass(frozen=True)
class _Slices:
    """Slices of one array of a reader."""

    reader: SafetensorsReader
    name: str

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.reader.read_slice(self.name, index)


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "safetensors files need the package safetensors: pip install "
            "safetensors, or in a clone of aqtlite pip install -e '.[safetensors]'"
        ) from error
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (safetensors.SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


class SafetensorsWriter(base.Writer):
    """Writes one file."""

    def check(self, arrays: Mapping[str, ArrayInfo]) -> None:
        for name, info in arrays.items():
            if name == _METADATA:
                raise CheckpointError(
                    f"safetensors keeps its own metadata under the name {name}; "
                    "rename the array, or name a folder as target, for Orbax"
                )
            if info.dtype not in _NAMES:
                raise CheckpointError(
                    f"safetensors cannot hold {name}, {info}; name a folder as target, "
                    "for Orbax"
                )

    def owns(self, path: pathlib.Path, names: Iterable[str]) -> bool:
        return path.is_file()

    def write(
        self,
        path: pathlib.Path,
        arrays: Sequence[LazyArray],
        manifest: Callable[[], str],
    ) -> None:
        header = _header(arrays, manifest())
        with path.open("xb") as file:
            file.write(header)
            for array in arrays:
                file.write(as_bytes(array.read()))
            file.seek(0)
            file.write(_header(arrays, manifest()))


def _key(name: str) -> str:
    """The key in a file: levels joined by dots, with dots and slashes escaped."""
    return ".".join(step.translate(_ESCAPES) for step in steps_of(name))


def _header(arrays: Sequence[LazyArray], manifest: str) -> bytes:
    entries: dict[str, object] = {}
    if manifest:
        entries[_METADATA] = {_MANIFEST: manifest}
    position = 0
    for array in arrays:
        stop = position + array.info.nbytes
        key = _key(array.name)
        if key in entries:
            raise CheckpointError(
                f"two arrays are named {array.name}, {array.info}: rename one of them"
            )
        entries[key] = {
            "dtype": _NAMES[array.info.dtype],
            "shape": array.info.shape,
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

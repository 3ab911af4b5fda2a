"""A safetensors file, written array by array.

The format (https://huggingface.co/docs/safetensors) is a header in JSON, its length in
front of it, and the bytes of the arrays behind. The library of that name writes a file
from arrays that are all in memory.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.arrays import LazyArray, as_bytes
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import Stored
from aqtlite.checkpoint.names import plain, steps_of
from aqtlite.checkpoint.sources.safetensors import DTYPES, METADATA_KEY
from aqtlite.checkpoint.targets import base

_METADATA = "__metadata__"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Safetensors(base.Target):
    """One file. int4, which the format lacks, is stored as int8."""

    def check(self, arrays: Mapping[str, Stored]) -> None:
        for name, stored in arrays.items():
            if any("." in step or "/" in step for step in steps_of(name)):
                raise CheckpointError(
                    f"safetensors separates levels by dots, which {plain(name)!r} has "
                    "in a step (or a slash); name a folder as target, for Orbax"
                )
            if name == _METADATA:
                raise CheckpointError(
                    f"safetensors keeps its own metadata under the name {name}; "
                    "rename the array, or name a folder as target, for Orbax"
                )
            if _stored_dtype(stored.info.dtype) not in _NAMES:
                raise CheckpointError(f"safetensors cannot hold {name}, {stored.info}")

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
                x = array.read().astype(_stored_dtype(array.info.dtype), copy=False)
                file.write(as_bytes(x))
            file.seek(0)
            file.write(_header(arrays, manifest()))


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype("int8") if dtype == jnp.int4 else dtype


def _header(arrays: Sequence[LazyArray], manifest: str) -> bytes:
    entries: dict[str, object] = {}
    if manifest:
        entries[_METADATA] = {METADATA_KEY: manifest}
    position = 0
    for array in arrays:
        dtype = _stored_dtype(array.info.dtype)
        stop = position + array.info.nbytes
        entries[".".join(steps_of(array.name))] = {
            "dtype": _NAMES[dtype],
            "shape": array.info.shape,
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

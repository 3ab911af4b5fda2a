"""A safetensors file, written array by array.

The format (https://huggingface.co/docs/safetensors) is a header in JSON, its length in
front of it, and the bytes of the arrays behind. The library of that name writes a file
from arrays that are all in memory.
"""

import json
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.arrays import LazyArray, as_bytes
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.sources.safetensors import DTYPES, METADATA_KEY
from aqtlite.checkpoint.targets import base

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Safetensors(base.Target):
    """One file. int4, which the format lacks, is stored as int8."""

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
                x = array.read().astype(_stored_dtype(array), copy=False)
                file.write(as_bytes(x))
            file.seek(0)
            file.write(_header(arrays, manifest()))


def _stored_dtype(array: LazyArray) -> np.dtype:
    is_int4 = array.info.dtype == jnp.int4
    return np.dtype("int8") if is_int4 else array.info.dtype


def _header(arrays: Sequence[LazyArray], manifest: str) -> bytes:
    entries: dict[str, object] = {}
    if manifest:
        entries["__metadata__"] = {METADATA_KEY: manifest}
    position = 0
    for array in arrays:
        dtype = _stored_dtype(array)
        if dtype not in _NAMES:
            raise CheckpointError(f"safetensors cannot hold {array.name}, {array.info}")
        stop = position + array.info.nbytes
        entries[array.name.replace("/", ".")] = {
            "dtype": _NAMES[dtype],
            "shape": array.info.shape,
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

"""safetensors files, one or several. Needs the `safetensors` extra."""

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.constants import Constant
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.names import name_of
from aqtlite.checkpoint.sources import base

SUFFIX = ".safetensors"
METADATA_KEY = "aqtlite"

DTYPES: dict[str, np.dtype] = {
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
}
"""The format's names of dtypes."""


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files in a folder."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


class Safetensors(base.Source):
    """One file, or a folder of them. Dots and slashes in names stand for levels."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._files = [path] if path.is_file() else files_in(path)

    @functools.cached_property
    def _entries(self) -> dict[str, tuple[pathlib.Path, str, ArrayInfo]]:
        entries: dict[str, tuple[pathlib.Path, str, ArrayInfo]] = {}
        for file in self._files:
            with _opened(file) as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no mapping)
                    part = tensors.get_slice(key)
                    dtype = DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise CheckpointError(
                            f"{key} in {file} is {part.get_dtype()}, which is none of "
                            f"{', '.join(DTYPES)}"
                        )
                    name = name_of(re.split(r"[./]", key))
                    if name in entries:
                        raise CheckpointError(
                            f"{key} is in {entries[name][0]} and in {file}"
                        )
                    info = ArrayInfo(tuple(part.get_shape()), dtype)
                    entries[name] = file, key, info
        return entries

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {name: info for name, (_, _, info) in self._entries.items()}

    @property
    def values(self) -> Mapping[str, Constant]:
        return {}

    def read(self, name: str) -> np.ndarray:
        file, key, info = self._entries[name]
        with _opened(file) as tensors:
            return _to_numpy(tensors.get_tensor(key), info)

    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        file, key, info = self._entries[name]
        with _opened(file) as tensors:
            part = tensors.get_slice(key)
            return jax.make_array_from_callback(
                info.shape, sharding, lambda index: _to_numpy(part[index], info)
            )

    def manifest(self) -> str | None:
        for file in self._files:
            with _opened(file) as tensors:
                text = (tensors.metadata() or {}).get(METADATA_KEY)
            if text is not None:
                return text
        return None

    def files(self) -> list[pathlib.Path]:
        return self._files


def _to_numpy(x: Any, info: ArrayInfo) -> np.ndarray:
    return np.asarray(x).astype(info.dtype, copy=False)


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "safetensors files need the package safetensors: "
            "pip install 'aqtlite[safetensors]'"
        ) from error
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (safetensors.SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error

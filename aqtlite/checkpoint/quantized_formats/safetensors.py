"""Tensors of a folder in the layout of Hugging Face: shards, an index, configs."""

import functools
import pathlib
from collections.abc import Mapping

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import safetensors
from aqtlite.checkpoint.quantized_formats.settings import Settings, read_json

INDEX = "*.safetensors.index.json"

_MAIN = "config.json"
_METHOD_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Configs that lie beside ``config.json``, and the method whose they are."""


class SafetensorsTensors:
    """The tensors of a file, of a folder, or of the shards that an index lists."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        index = None if path.is_file() else _index_in(path)
        files = None if index is None else _shards(index)
        self._reader = safetensors.SafetensorsReader(path, files)
        if index is not None:
            self._check_index(index)

    @property
    def where(self) -> str:
        return str(self._path)

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """Names of the float reader by the tensors' own."""
        return {key: name for name, (_, key) in self._reader.places.items()}

    @functools.cached_property
    def infos(self) -> Mapping[str, ArrayInfo]:
        for name, text in self._reader.others.items():
            raise CheckpointError(f"{name} in {self._path} is {text}")
        return {key: self._reader.arrays[name] for key, name in self.names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._reader.read(self.names[name])

    def _check_index(self, index: pathlib.Path) -> None:
        places = {key: file.name for file, key in self._reader.places.values()}
        listed = _weight_map(index)
        for name in sorted(listed.keys() | places.keys()):
            if listed.get(name) != places.get(name):
                raise CheckpointError(
                    f"{index} says that {name} is in {listed.get(name, 'no file')}, "
                    f"and it is in {places.get(name, 'none')}"
                )


def configs_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The configs that a checkpoint has, in its folder or beside its file."""
    folder = path if path.is_dir() else path.parent
    files = [folder / name for name in (_MAIN, *_METHOD_FILES)]
    return [file for file in files if file.is_file()]


def quantization_settings(path: pathlib.Path) -> tuple[str | None, Settings]:
    """Finds the method and the config of a quantized checkpoint.

    Returns:
        `quant_method`, and the settings of the quantization; the method is None, and
        the settings empty, for a checkpoint without.

    Raises:
        CheckpointError: if a config is no JSON, or names no method.
    """
    for file in configs_of(path):
        settings = Settings(read_json(file), str(file))
        if file.name != _MAIN:
            return _METHOD_FILES[file.name], settings
        text_model = settings.inner("text_config")
        for place in (settings, text_model):
            if place is None:
                continue
            for key in ("quantization_config", "compression_config"):
                found = place.inner(key)
                if found is not None:
                    return _method_of(found), found
    return None, Settings({}, str(path if path.is_dir() else path.parent))


def _method_of(settings: Settings) -> str:
    method = settings.values.get("quant_method")
    if isinstance(method, str):
        return method
    if settings.values.get("load_in_4bit") or settings.values.get("load_in_8bit"):
        return "bitsandbytes"  # Files of before quant_method.
    raise settings.wrong("quant_method", "the name of a format")


def _index_in(folder: pathlib.Path) -> pathlib.Path | None:
    found = sorted(folder.glob(INDEX))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{folder} has several indices, {names}: name a file")
    return found[0] if found else None


def _weight_map(index: pathlib.Path) -> Mapping[str, str]:
    settings = Settings(read_json(index), str(index))
    found = settings.values.get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) for file in found.values()
    ):
        raise settings.wrong("weight_map", "an object of file names")
    return found


def _is_file(path: pathlib.Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # No file can have this name.
        return False


def _shards(index: pathlib.Path) -> list[pathlib.Path]:
    files = []
    for name in sorted(set(_weight_map(index).values())):
        if pathlib.PurePath(name).name != name:
            raise CheckpointError(
                f"{index} names the file {name!r}, outside its folder"
            )
        file = index.parent / name
        if not _is_file(file):
            raise CheckpointError(f"{index} names {name[:80]}, which is missing")
        files.append(file)
    return files

"""The tokens that end a text, as the files of a model name them."""

import os
import pathlib
from typing import Any

from aqtlite.checkpoint import CheckpointError, load_quantized
from aqtlite.checkpoint.quantized_formats.settings import read_json
from aqtlite.llm import gguf_tokenizer


def stop_tokens(path: str | os.PathLike) -> frozenset[int]:
    """The tokens that end a text of a model; none if no file names any.

    Args:
        path: a folder or file of Hugging Face, or a GGUF file.

    Raises:
        CheckpointError: if a file is damaged, or what it names is no number.
    """
    path = pathlib.Path(path)
    is_gguf = path.suffix == ".gguf"
    if not is_gguf:
        folder = path if path.is_dir() else path.parent
        found = of_configs(folder)
        if found:
            return found
        # Of several, none is the folder's model.
        is_gguf = path.is_dir() and len(list(path.glob("*.gguf"))) == 1
    if is_gguf:
        source = load_quantized(path)
        if source.method == "gguf":
            return gguf_tokenizer.stop_of(source.metadata, str(path))
    return frozenset()


def of_configs(folder: pathlib.Path) -> frozenset[int]:
    """The tokens of the first config in a folder that names any."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = read_json(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return _numbers(found, file)
    return frozenset()


def _numbers(found: Any, file: pathlib.Path) -> frozenset[int]:
    numbers = found if isinstance(found, list) else [found]
    if not all(type(one) is int for one in numbers):
        raise CheckpointError(f"{file}: eos_token_id has to be numbers, got {found!r}")
    return frozenset(numbers)

"""Optional packages, which the extras of aqtlite install."""

import importlib
import importlib.util
from typing import Any

EXTRAS = {
    "ai_edge_litert": "edge",
    "llvmlite": "cpu",
    "litert_converter": "edge",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "tokenizers": "llm",
}
"""Extra that installs each package."""

_FILES = {
    "edge": "a LiteRT file",
    "llm": "a language model",
    "onnx": "an ONNX file",
}


def require(name: str) -> None:
    """Checks that a package is installed, without importing it.

    Raises:
        ModuleNotFoundError: if it is not installed; the message names the extra.
    """
    if importlib.util.find_spec(name) is None:
        extra = EXTRAS[name]
        raise ModuleNotFoundError(
            f"{_FILES[extra]} is read or written with the packages of the extra "
            f"{extra}: pip install 'aqtlite[{extra}]'",
            name=name,
        )


def is_installed(name: str) -> bool:
    """Returns True if a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def package(name: str) -> Any:
    """Imports a package, or a module of it.

    Raises:
        ModuleNotFoundError: if it is not installed; the message names the extra.
    """
    require(name.partition(".")[0])
    return importlib.import_module(name)

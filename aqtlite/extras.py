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
    "jinja2": "llm",
    "tokenizers": "llm",
}
"""Extra that installs each package."""

_NEEDS = {
    "cpu": "a kernel for CPUs is compiled",
    "edge": "a LiteRT file is read and written",
    "llm": "a language model is read",
    "onnx": "an ONNX file is read and written",
}


def is_installed(name: str) -> bool:
    """Returns True if a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def require(name: str) -> None:
    """Checks that a package is installed, without importing it.

    Raises:
        ModuleNotFoundError: if it is not installed; the message names the extra.
    """
    if not is_installed(name):
        extra = EXTRAS[name]
        raise ModuleNotFoundError(
            f"{_NEEDS[extra]} with the packages of the extra {extra}: "
            f"pip install 'aqtlite[{extra}]'",
            name=name,
        )


def package(name: str) -> Any:
    """Imports a package, or a module of it.

    Raises:
        ModuleNotFoundError: if it is not installed; the message names the extra.
    """
    require(name.partition(".")[0])
    return importlib.import_module(name)

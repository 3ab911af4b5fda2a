"""Conversion of StableHLO to a LiteRT flatbuffer.

The converter and the interpreter run in separate processes (`aqtlite.edge.litert`),
because both may crash on unexpected programs.
"""

import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from aqtlite.edge import litert
from aqtlite.extras import require

SIGNATURE = "serving_default"
"""Name of the signature of a file with one."""


class Function(NamedTuple):
    """A function with annotated integers, and its signature in the file."""

    function: Callable[..., Sequence[Any]]
    """Function of arrays that returns a sequence of arrays."""

    inputs: Sequence[jax.ShapeDtypeStruct]
    """Abstract values of the arguments."""

    input_names: Sequence[str]
    output_names: Sequence[str]


def convert(functions: Mapping[str, Function]) -> bytes:
    """Converts functions to the bytes of a LiteRT file.

    Args:
        functions: the functions by name of their signature. Equal constants of several
            are stored once.

    Raises:
        ModuleNotFoundError: if the converter is not installed.
        ValueError: if the converter refuses a program.
    """
    require("litert_converter")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        signatures = []
        for number, (signature, one) in enumerate(functions.items()):
            # Dropping unused inputs would shift the others against their names.
            compiled = jax.jit(one.function, keep_unused=True)
            lowered: Any = compiled.lower(*one.inputs).compiler_ir("stablehlo")
            _write(lowered.operation, folder / f"{number}.mlir")
            signatures.append(
                {
                    "program": f"{number}.mlir",
                    "name": signature,
                    "inputs": list(one.input_names),
                    "outputs": list(one.output_names),
                }
            )
        (folder / "signatures.json").write_text(json.dumps(signatures))
        refusal = _refusal("convert", folder)
        if refusal is not None:
            raise ValueError(f"the LiteRT converter refuses the program: {refusal}")
        return (folder / "model.tflite").read_bytes()


def _write(operation: Any, path: pathlib.Path) -> None:
    """Writes a module in the form that the converter can read."""
    with path.open("wb") as file:
        # The converter has an older MLIR. StableHLO bytecode is stable, but other
        # dialects (`chlo.top_k`) can only be read as text.
        if "chlo." in operation.get_asm(large_elements_limit=16):
            file.write(operation.get_asm().encode())
        else:
            operation.write_bytecode(file)


def check_runs(data: bytes) -> None:
    """Runs a file once, on zeros, in a separate process.

    The interpreter refuses some operators of mixed widths that the converter accepts.

    Raises:
        ModuleNotFoundError: if the interpreter is not installed.
        ValueError: if the interpreter refuses the file.
    """
    require("ai_edge_litert")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.tflite").write_bytes(data)
        refusal = _refusal("run", folder)
    if refusal is not None:
        raise ValueError(
            f"LiteRT's interpreter refuses the file: {refusal}. If rules ask for int16 "
            "for some operators, ask for it for those around them, too; otherwise "
            "export to a path that ends in .onnx"
        )


def _refusal(step: Literal["convert", "run"], folder: pathlib.Path) -> str | None:
    """Runs a step in a separate process; returns why it failed, or None."""
    program = pathlib.Path(litert.__file__).parent
    done = subprocess.run(
        [sys.executable, str(program), step, str(folder)],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return None
    said = folder / "refusal.txt"
    if said.exists():
        return _first(said.read_text())
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"its process ended with {how}: {' / '.join(lines[-3:])}"


def _first(message: str) -> str:
    """The first error line of a message, or its first line without any."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    found = [line for line in lines if "error:" in line] or lines
    return re.sub(r"^.*error: ", "", found[0])

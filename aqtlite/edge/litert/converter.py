"""Conversion of StableHLO to a LiteRT flatbuffer.

The converter and the interpreter run in separate processes (`aqtlite.edge.litert`),
because both may crash on unexpected programs.
"""

import io
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple

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
    with tempfile.TemporaryFile() as file:
        programs = (
            {
                "program": _serialized(one),
                "name": signature,
                "inputs": list(one.input_names),
                "outputs": list(one.output_names),
            }
            for signature, one in functions.items()
        )
        # In the file alone, not in memory, while they are converted.
        pickle.dump(list(programs), file)
        data, refusal = _in_a_process("convert", file)
    if refusal is not None:
        raise ValueError(f"the LiteRT converter refuses the program: {refusal}")
    return data


def _serialized(function: Function) -> bytes:
    """A function as StableHLO, in the form that the converter can read."""
    # Dropping unused inputs would shift the others against their names.
    compiled = jax.jit(function.function, keep_unused=True)
    lowered: Any = compiled.lower(*function.inputs).compiler_ir("stablehlo")
    operation = lowered.operation
    # The converter has an older MLIR. StableHLO bytecode is stable, but other
    # dialects (`chlo.top_k`) can only be read as text.
    if "chlo." in operation.get_asm(large_elements_limit=16):
        return str(operation.get_asm()).encode()
    buffer = io.BytesIO()
    operation.write_bytecode(buffer)
    return buffer.getvalue()


def check_runs(data: bytes) -> None:
    """Runs a file once, on zeros, in a separate process.

    The interpreter refuses some operators of mixed widths that the converter accepts.

    Raises:
        ModuleNotFoundError: if the interpreter is not installed.
        ValueError: if the interpreter refuses the file, or an output has another shape
            than the file says.
    """
    require("ai_edge_litert")
    with tempfile.TemporaryFile() as file:
        pickle.dump(data, file)
        _, refusal = _in_a_process("run", file)
    if refusal is not None:
        raise ValueError(
            f"LiteRT's interpreter refuses the file: {refusal}. If rules ask for int16 "
            "for some operators, ask for it for those around them, too; otherwise "
            "export to a path that ends in .onnx"
        )


def _in_a_process(
    step: Literal["convert", "run"], given: IO[bytes]
) -> tuple[bytes, str | None]:
    """Runs a step in a separate process, on what is pickled in a temporary file.

    Where this process is killed, nothing stays: the file has no name, and the other
    process ends when nobody reads its result any more.

    Returns:
        The result; and why the step failed, or None.
    """
    program = pathlib.Path(litert.__file__).parent
    given.seek(0)
    done = subprocess.run(
        [sys.executable, str(program), step], stdin=given, capture_output=True
    )
    if done.returncode == 0:
        return done.stdout, None
    if done.returncode == 1 and done.stdout:
        return b"", _first(done.stdout.decode(errors="replace"))
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    said = done.stderr.decode(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return b"", f"its process ended with {how}: {' / '.join(lines[-3:])}"


def _first(message: str) -> str:
    """The first error line of a message, or its first line without any."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    found = [line for line in lines if "error:" in line] or lines
    return re.sub(r"^.*error: ", "", found[0])

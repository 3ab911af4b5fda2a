"""Converts programs, or runs a file once; started by `aqtlite.edge.litert.converter`.

    python FOLDER_OF_THIS_FILE convert|run

Standard input is what to convert or run, pickled; standard output is the result, or
with exit code 1 the refusal. Imports neither aqtlite nor JAX, which would take longer
than the work itself.

`litert_converter.converter_api_ext` is documented as unstable. The extra ``edge`` pins
its version, and only this file uses it.
"""

import contextlib
import fcntl
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class _Refusal(Exception):
    """A program or file that LiteRT does not take."""


def convert(programs: Sequence[dict[str, Any]]) -> bytes:
    """Converts programs to the bytes of a file.

    Args:
        programs: the bytes of each program, under "program", which are taken out; its
            "name", and the names of its "inputs" and "outputs".

    Raises:
        _Refusal: if the converter refuses a program.
    """
    from litert_converter import converter_api_ext
    from litert_converter.mlir import ir, passmanager

    context = ir.Context()
    converter_api_ext.prepare_mlir_context(context)
    modules = []
    with context:
        try:
            for one in programs:
                module = ir.Module.parse(one.pop("program"))
                config = converter_api_ext.ConvertToTFLConfig()
                config.model_origin_framework = "JAX"
                # Otherwise composites remain, and the file does not load.
                config.strict_qdq_mode = True
                converter_api_ext.set_signature(
                    module.operation, one["name"], one["inputs"], one["outputs"]
                )
                converter_api_ext.run_convert_to_tfl_passes(
                    module, passmanager.PassManager(), config
                )
                modules.append(module)
            if len(modules) > 1:
                # Equal constants share a buffer of the file.
                modules = [converter_api_ext.merge_modules(modules)]
            (module,) = modules
            return bytes(converter_api_ext.export_flatbuffer_to_bytes(module.operation))
        except (RuntimeError, ValueError, ir.MLIRError) as error:
            raise _Refusal(str(error) or type(error).__name__) from error


def run(data: bytes) -> bytes:
    """Runs each signature of a file once, on zeros.

    Raises:
        _Refusal: if the interpreter refuses the file, or an output has another shape
            than the file says.
    """
    import numpy as np
    from ai_edge_litert import interpreter

    try:
        model = interpreter.Interpreter(model_content=data)
        for name in model.get_signature_list():
            runner = model.get_signature_runner(name)
            inputs = runner.get_input_details().items()
            outputs = {
                key: tuple(map(int, one["shape"]))
                for key, one in runner.get_output_details().items()
            }
            zeros = {key: np.zeros(one["shape"], one["dtype"]) for key, one in inputs}
            for key, x in runner(**zeros).items():
                # The converter has made convolutions of another shape.
                if x.shape != outputs[key]:
                    raise _Refusal(
                        f"the output {key!r} has the shape {x.shape} when it runs, and "
                        f"{outputs[key]} in the file"
                    )
    except (RuntimeError, ValueError) as error:
        raise _Refusal(str(error) or type(error).__name__) from error
    return b""


@contextlib.contextmanager
def _ending_with_reader(pipe: int) -> Iterator[None]:
    """Ends this process when the one that reads from a pipe does, however it ends.

    The kernel sends a signal when the pipe closes, which ends the process even while a
    library holds Python's lock, for which a thread would wait. Since it also comes when
    the pipe is read, writing is left out, which fails on a closed pipe anyway.
    """
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_ASYNC)
    yield
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags)


_STEPS: dict[str, Callable[[Any], bytes]] = {"convert": convert, "run": run}


def main(step: str) -> int:
    """Runs a step; returns the exit code."""
    # Libraries print to standard output, too.
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with _ending_with_reader(result.fileno()):
        try:
            said, code = _STEPS[step](pickle.load(sys.stdin.buffer)), 0
        except _Refusal as refusal:
            said, code = str(refusal).encode(), 1
    with result:
        result.write(said)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

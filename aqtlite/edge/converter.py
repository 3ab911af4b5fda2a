"""The LiteRT converter: from StableHLO to a flatbuffer.

`litert_converter.converter_api_ext` says of itself that it is not stable. Its version
is pinned by the extra ``edge``, and this file has all use of it.
"""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

SIGNATURE = "serving_default"


def convert(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[jax.ShapeDtypeStruct],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> bytes:
    """Converts a function whose integers are annotated.

    Args:
        function: of arrays, returns a sequence of arrays.
        inputs: its arguments' shapes.
        input_names: of the signature.
        output_names: the same.

    Raises:
        ModuleNotFoundError: if the converter is not installed.
        ValueError: if it refuses the program.
    """
    try:
        from litert_converter import converter_api_ext
        from litert_converter.mlir import ir, passmanager
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a LiteRT file is written with the packages of the extra edge: pip install "
            "'aqtlite[edge]'",
            name=error.name,
        ) from error
    # What is not used keeps its place among the names of inputs.
    compiled = jax.jit(function, keep_unused=True)
    lowered: Any = compiled.lower(*inputs).compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    lowered.operation.write_bytecode(bytecode)
    context = ir.Context()
    converter_api_ext.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(bytecode.getvalue())
        config = converter_api_ext.ConvertToTFLConfig()
        config.model_origin_framework = "JAX"
        # Otherwise composites stay, and the file does not load.
        config.strict_qdq_mode = True
        converter_api_ext.set_signature(
            module.operation, SIGNATURE, list(input_names), list(output_names)
        )
        try:
            converter_api_ext.run_convert_to_tfl_passes(
                module, passmanager.PassManager(), config
            )
            data: bytes = converter_api_ext.export_flatbuffer_to_bytes(module.operation)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"the LiteRT converter refuses the program: {_first(error)}"
            ) from error
    return data


def _first(error: BaseException) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = [line for line in lines if "error:" in line] or lines
    return re.sub(r"^.*error: ", "", found[0]) if found else type(error).__name__


def check_runs(data: bytes) -> None:
    """Runs a file once, on zeros.

    Some operators of mixed widths are refused only there.

    Raises:
        ModuleNotFoundError: if the interpreter is not installed.
        ValueError: if it refuses the file.
    """
    try:
        from ai_edge_litert import interpreter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a LiteRT file is run once with the packages of the extra edge: pip "
            "install 'aqtlite[edge]'",
            name=error.name,
        ) from error
    try:
        model = interpreter.Interpreter(model_content=data)
        model.allocate_tensors()
        for one in model.get_input_details():
            model.set_tensor(one["index"], np.zeros(one["shape"], one["dtype"]))
        model.invoke()
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"LiteRT's interpreter refuses the file: {_first(error)}. Where rules ask "
            "for int16 for some operators, ask for it for those around them, too"
        ) from error

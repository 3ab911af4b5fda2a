"""Converts programs, or runs a file once; started by `aqtlite.edge.litert.converter`.

    python FOLDER_OF_THIS_FILE convert|run FOLDER

FOLDER holds input and output files. Imports neither aqtlite nor JAX, which would take
longer than the work itself.

`litert_converter.converter_api_ext` is documented as unstable. The extra ``edge`` pins
its version, and only this file uses it.
"""

import json
import pathlib
import sys


def convert(folder: pathlib.Path) -> None:
    """Converts the programs of ``signatures.json`` to ``model.tflite``."""
    from litert_converter import converter_api_ext
    from litert_converter.mlir import ir, passmanager

    context = ir.Context()
    converter_api_ext.prepare_mlir_context(context)
    modules = []
    with context:
        try:
            for one in json.loads((folder / "signatures.json").read_text()):
                module = ir.Module.parse((folder / one["program"]).read_bytes())
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
            data = converter_api_ext.export_flatbuffer_to_bytes(module.operation)
        except (RuntimeError, ValueError, ir.MLIRError) as error:
            _refuse(folder, error)
    (folder / "model.tflite").write_bytes(data)


def run(folder: pathlib.Path) -> None:
    """Runs each signature of ``model.tflite`` once, on zeros."""
    import numpy as np
    from ai_edge_litert import interpreter

    try:
        model = interpreter.Interpreter(model_path=str(folder / "model.tflite"))
        for name in model.get_signature_list():
            runner = model.get_signature_runner(name)
            inputs = runner.get_input_details().items()
            runner(**{key: np.zeros(one["shape"], one["dtype"]) for key, one in inputs})
    except (RuntimeError, ValueError) as error:
        _refuse(folder, error)


def _refuse(folder: pathlib.Path, error: Exception) -> None:
    (folder / "refusal.txt").write_text(str(error) or type(error).__name__)
    sys.exit(1)


if __name__ == "__main__":
    {"convert": convert, "run": run}[sys.argv[1]](pathlib.Path(sys.argv[2]))

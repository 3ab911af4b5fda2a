"""Files for edge devices: this library's, and ai-edge-quantizer's of a float one."""

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import aqtlite
from aqtlite import config, edge
from benchmarks.pretrained import peers
from benchmarks.pretrained.tasks.task import Arrays


class NoQuantizerError(Exception):
    """ai-edge-quantizer is not installed; the message says how to install it."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What files are made of."""

    network: Callable[..., Any]
    """Function of the parameters and the inputs."""
    parameters: Any
    calibration: Sequence[Arrays]
    rules: Sequence[edge.Rule]
    """Those that full-integer files of the network need; see `Network.edge_rules`."""


def _in_float(source: Source, path: pathlib.Path) -> pathlib.Path:
    inputs = source.calibration[0]
    edge.export(source.network, source.parameters, None, inputs, path)
    return path


def _dynamic(source: Source, path: pathlib.Path) -> pathlib.Path:
    inputs = source.calibration[0]
    rules = [aqtlite.Rule(operands="weight", cfg=config.qat(8))]
    quantized = aqtlite.quantize_function(source.network, rules, params=0)
    serve, serving = aqtlite.convert_function(quantized, source.parameters, *inputs)
    edge.export(serve, serving, None, inputs, path)
    return path


def _static(source: Source, path: pathlib.Path) -> pathlib.Path:
    held = source.calibration[: peers.CALIBRATION_BATCHES]
    network, parameters, rules = source.network, source.parameters, source.rules
    ranges = edge.calibrate(network, parameters, held, rules)
    edge.export(network, parameters, ranges, held[0], path, rules, interface="float")
    return path


def _peer_dynamic(source: Source, path: pathlib.Path) -> pathlib.Path:
    _check_installed()
    from ai_edge_quantizer import quantizer, recipe

    source_file = _in_float(source, path.with_name("float.tflite"))
    made = quantizer.Quantizer(str(source_file), recipe.dynamic_wi8_afp32())
    made.quantize().export_model(str(path))
    return path


def _peer_static(source: Source, path: pathlib.Path) -> pathlib.Path:
    _check_installed()
    from ai_edge_quantizer import quantizer, recipe

    source_file = _in_float(source, path.with_name("float.tflite"))
    made = quantizer.Quantizer(str(source_file), recipe.static_wi8_ai8())
    for place in ("INPUT", "OUTPUT"):  # These stay in float.
        made.update_quantization_recipe(".*", place, algorithm_key="no_quantize")
    names = list(_runner(source_file).get_input_details())
    held = source.calibration[: peers.CALIBRATION_BATCHES]
    feeds = [dict(zip(names, batch, strict=True)) for batch in held]
    made.quantize(made.calibrate({"serving_default": feeds})).export_model(str(path))
    return path


FILES: dict[str, tuple[str, Callable[[Source, pathlib.Path], pathlib.Path]]] = {
    "LiteRT file, float32": (".tflite", _in_float),
    "LiteRT file, dynamic int8": (".tflite", _dynamic),
    "LiteRT file, static int8": (".tflite", _static),
    "ONNX file, dynamic int8": (".onnx", _dynamic),
    "ONNX file, static int8": (".onnx", _static),
    "ai-edge-quantizer, dynamic int8": (".tflite", _peer_dynamic),
    "ai-edge-quantizer, static int8": (".tflite", _peer_static),
}
"""Suffixes of the files, and functions that write them, by name of the contestant."""


def write(name: str, source: Source, folder: pathlib.Path) -> pathlib.Path:
    """Writes the file of a contestant.

    Args:
        name: one of `FILES`.
        source: what it is made of.
        folder: where to write.

    Raises:
        NoQuantizerError: if ai-edge-quantizer is needed and not installed.
        ValueError: if the network has no such file; RuntimeError where another
            library says so.
    """
    suffix, function = FILES[name]
    return function(source, folder / f"model{suffix}")


def loaded(path: pathlib.Path) -> Callable[..., Arrays]:
    """A file as a function of its inputs, with as many threads as XLA has."""
    if path.suffix == ".onnx":
        return peers.session(path)
    runner = _runner(path)
    names = list(runner.get_input_details())

    def call(*inputs: np.ndarray) -> Arrays:
        outputs = runner(**dict(zip(names, inputs, strict=True)))
        return tuple(outputs[name] for name in sorted(outputs, key=_place))

    return call


def _runner(path: pathlib.Path) -> Any:
    from ai_edge_litert import interpreter

    threads = len(os.sched_getaffinity(0))
    model = interpreter.Interpreter(str(path), num_threads=threads)
    return model.get_signature_runner()


def _place(name: str) -> int:
    """The place of an output among several: of output, output_1, output_2."""
    number = name.rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _check_installed() -> None:
    if importlib.util.find_spec("ai_edge_quantizer") is None:
        raise NoQuantizerError(
            "ai-edge-quantizer is not installed; pip install --no-deps "
            "ai-edge-quantizer immutabledict"
        )

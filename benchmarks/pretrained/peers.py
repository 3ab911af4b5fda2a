"""onnxruntime: the network in float, and its own ways to quantize it."""

import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.pretrained.tasks.task import Arrays

FLOAT = "onnxruntime, float32"
DYNAMIC = "onnxruntime, dynamic int8"
STATIC = {
    "onnxruntime, static int8, min-max": "MinMax",
    "onnxruntime, static int8, percentile": "Percentile",
}

OPSET = 13
"""The first with a scale for each channel, to which older files are converted."""

CALIBRATION_BATCHES = 4
"""Batches for static ranges; the histograms of percentiles hold all activations."""


def errors() -> tuple[type[Exception], ...]:
    """What onnxruntime raises where it cannot quantize or load a network."""
    from onnxruntime.capi import onnxruntime_pybind11_state as own

    of_graphs = (own.Fail, own.InvalidGraph, own.NotImplemented, own.RuntimeException)
    return (*of_graphs, RuntimeError, ValueError, TypeError)


def session(path: pathlib.Path) -> Callable[..., Arrays]:
    """A file as a function of its inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # As many threads as XLA has. Threads that spin would slow whoever runs next.
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    loaded = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    names = [one.name for one in loaded.get_inputs()]

    def call(*inputs: np.ndarray) -> Arrays:
        return tuple(loaded.run(None, dict(zip(names, inputs, strict=True))))

    return call


def quantize(
    name: str,
    network: pathlib.Path,
    calibration: Sequence[Arrays],
    folder: pathlib.Path,
) -> pathlib.Path:
    """Writes the file that onnxruntime makes, with its advice: preprocessed before.

    Args:
        name: `DYNAMIC` or one of `STATIC`.
        network: the network's file.
        calibration: inputs for static ranges.
        folder: where to write.
    """
    import onnx
    from onnx import version_converter
    from onnxruntime import quantization

    newer, prepared, result = (folder / f"{i}.onnx" for i in range(3))
    model = onnx.load(str(network))
    if model.opset_import[0].version < OPSET:
        model = version_converter.convert_version(model, OPSET)
    onnx.save(model, str(newer))
    quantization.quant_pre_process(newer, prepared, skip_symbolic_shape=True)
    if name == DYNAMIC:
        quantization.quantize_dynamic(
            prepared, result, weight_type=quantization.QuantType.QInt8
        )
        return result
    quantization.quantize_static(
        prepared,
        result,
        _reader(prepared, calibration[:CALIBRATION_BATCHES]),
        per_channel=True,
        calibrate_method=quantization.CalibrationMethod[STATIC[name]],
    )
    return result


def _reader(network: pathlib.Path, batches: Sequence[Arrays]):
    """The batches as onnxruntime reads them."""
    import onnxruntime
    from onnxruntime import quantization

    loaded = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    names = [one.name for one in loaded.get_inputs()]
    feeds = iter([dict(zip(names, batch, strict=True)) for batch in batches])

    class Reader(quantization.CalibrationDataReader):
        def get_next(self):
            return next(feeds, None)

    return Reader()

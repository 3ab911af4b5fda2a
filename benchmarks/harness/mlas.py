"""Dense layers in onnxruntime, whose CPU kernels are MLAS."""

import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

FLOAT32 = "onnxruntime, float32"
INT8 = "onnxruntime, int8"

_OPSET = 21


def is_installed() -> bool:
    """Whether onnxruntime, and onnx to write its files, can be imported."""
    return all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))


def served_layers(
    kernel: np.ndarray, bias: np.ndarray
) -> dict[str, Callable[[np.ndarray], list[np.ndarray]]]:
    """Calls of ``x -> x @ kernel + bias`` by contestant, in float32 and in int8.

    The int8 file is what `onnxruntime.quantization.quantize_dynamic` makes: a scale for
    each column of the kernel, and one for each input as a whole, computed in the call.
    """
    from onnxruntime import quantization

    with tempfile.TemporaryDirectory() as directory:
        float32, int8 = (pathlib.Path(directory, f"{i}.onnx") for i in range(2))
        float32.write_bytes(_model(kernel, bias).SerializeToString())
        quantization.quantize_dynamic(
            float32, int8, per_channel=True, weight_type=quantization.QuantType.QInt8
        )
        return {FLOAT32: _calling(float32), INT8: _calling(int8)}


def _model(kernel: np.ndarray, bias: np.ndarray) -> Any:
    """An ONNX model of one layer, for any number of rows."""
    from onnx import TensorProto, helper, numpy_helper

    x, out = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
        for name, size in zip(("x", "out"), kernel.shape, strict=True)
    )
    nodes = [
        helper.make_node("MatMul", ["x", "kernel"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["out"]),
    ]
    weights = [
        numpy_helper.from_array(kernel, "kernel"),
        numpy_helper.from_array(bias, "bias"),
    ]
    graph = helper.make_graph(nodes, "layer", [x], [out], weights)
    opset = helper.make_opsetid("", _OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    # quantize_dynamic advises simplifying the graph first unless it is marked.
    helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    return model


def _calling(path: pathlib.Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # As many threads as XLA has. Threads that spin would slow whoever runs next.
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    return lambda x: session.run(None, {"x": x})

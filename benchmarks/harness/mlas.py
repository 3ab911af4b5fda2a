"""Dense layers in onnxruntime, whose CPU kernels are MLAS."""

import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from aqtlite.lowering.forms import processor

FLOAT32 = "onnxruntime, float32"
INT8 = "onnxruntime, int8"
INT4 = "onnxruntime, int4 in blocks of 32"

_OPSET = 21

_BLOCK, _INT8_ACTIVATIONS = 32, 4


def is_installed() -> bool:
    """Whether onnxruntime, and onnx to write its files, can be imported."""
    return all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))


def served_layers(
    kernel: np.ndarray, bias: np.ndarray
) -> dict[str, Callable[[np.ndarray], list[np.ndarray]]]:
    """Calls of ``x -> x @ kernel + bias`` by contestant, in float32 and in int8.

    The int8 file is what `onnxruntime.quantization.quantize_dynamic` makes: a scale for
    each column of the kernel, and one for each input as a whole, computed in the call.
    Its weights are uint8 on x86-64 without VNNI, where sums for int8 saturate.
    """
    from onnxruntime import quantization

    has_vnni = processor.adds_products_of_bytes()
    kind = quantization.QuantType.QInt8 if has_vnni else quantization.QuantType.QUInt8
    with tempfile.TemporaryDirectory() as directory:
        float32, int8 = (pathlib.Path(directory, f"{i}.onnx") for i in range(2))
        float32.write_bytes(_model(kernel, bias).SerializeToString())
        quantization.quantize_dynamic(float32, int8, per_channel=True, weight_type=kind)
        return {FLOAT32: _calling(float32), INT8: _calling(int8)}


def served_int4_layer(
    kernel: np.ndarray, bias: np.ndarray
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """The call of such a layer of int4 weights with a scale for each 32 of a column.

    "MatMulNBits", which rounds the activations to int8, in blocks as well.
    """
    from onnx import helper

    features, columns = kernel.shape
    blocks = kernel.T.reshape(columns, features // _BLOCK, _BLOCK)
    scale = np.abs(blocks).max(2, keepdims=True) / 7
    integers = (np.rint(blocks / scale) + 8).astype(np.uint8)
    weights = {
        "kernel": integers[:, :, ::2] | integers[:, :, 1::2] << 4,
        "scale": scale.reshape(-1).astype(np.float32),
        "bias": bias,
    }
    product = helper.make_node(
        "MatMulNBits",
        ["x", "kernel", "scale"],
        ["product"],
        domain="com.microsoft",
        K=features,
        N=columns,
        bits=4,
        block_size=_BLOCK,
        accuracy_level=_INT8_ACTIVATIONS,
    )
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "int4.onnx")
        model = _layer(product, kernel.shape, weights)
        path.write_bytes(model.SerializeToString())
        return _calling(path)


def _model(kernel: np.ndarray, bias: np.ndarray) -> Any:
    """An ONNX model of one layer."""
    from onnx import helper

    product = helper.make_node("MatMul", ["x", "kernel"], ["product"])
    return _layer(product, kernel.shape, {"kernel": kernel, "bias": bias})


def _layer(product: Any, shape: tuple[int, ...], weights: dict[str, np.ndarray]) -> Any:
    """An ONNX model of a product and a bias, for any number of rows.

    Args:
        product: node from "x" to "product".
        shape: shape of the kernel.
        weights: values of the inputs of nodes, among them "bias".
    """
    from onnx import TensorProto, helper, numpy_helper

    x, out = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
        for name, size in zip(("x", "out"), shape, strict=True)
    )
    nodes = [product, helper.make_node("Add", ["product", "bias"], ["out"])]
    values = [numpy_helper.from_array(one, name) for name, one in weights.items()]
    graph = helper.make_graph(nodes, "layer", [x], [out], values)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
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

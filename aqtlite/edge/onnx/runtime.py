"""Inspection of an ONNX file, as written and as optimized by onnxruntime."""

import pathlib
import tempfile
from typing import Any

import numpy as np

from aqtlite.edge.report import File, FileOperator, Tensor
from aqtlite.extras import package

_GIVE = {
    "ArgMax": "int64",
    "ArgMin": "int64",
    "DequantizeLinear": "float32",
    "Equal": "bool",
    "Greater": "bool",
    "GreaterOrEqual": "bool",
    "Less": "bool",
    "LessOrEqual": "bool",
    "QuantizeLinear": "uint8",
}
"""Dtypes of outputs, by operators with an output dtype unlike that of any input."""

_TYPED_BY = {"QLinearConcat": 2, "QLinearWhere": 1, "Where": 1}
"""Index of the input with the output's dtype, if not the first, by operator."""


_SCALING = ("QuantizeLinear", "DequantizeLinear")


def optimized(data: bytes) -> File:
    """The operators that onnxruntime runs, after its fusions.

    Raises:
        ModuleNotFoundError: if onnxruntime is not installed.
        ValueError: if onnxruntime refuses the file.
    """
    onnx, onnxruntime = package("onnx"), package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(path)
        try:
            onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"]
            )
        except _errors() as error:
            raise ValueError(f"onnxruntime refuses the file: {error}") from error
        model = onnx.load(path)
    given = onnx.shape_inference.infer_shapes(onnx.load_from_string(data))
    tensors = _tensors(onnx, given)
    for name, x in constants(onnx, model).items():
        held = x.tobytes()
        tensors[name] = Tensor(name, x.shape, x.dtype.name, None, None, 0, held)
    scaling = {
        name
        for node in given.graph.node
        if node.op_type in _SCALING
        for name in node.input[1:]
    }
    operators = []
    for node in model.graph.node:
        # Leave out scales and zero points, which are not operands.
        is_quantized = node.op_type in _SCALING or node.op_type.startswith("Q")
        hidden = scaling if is_quantized else set()
        inputs = tuple(None if i in hidden else tensors.get(i) for i in node.input)
        outputs = tuple(_output(onnx, node, name, inputs) for name in node.output)
        outputs = tuple(tensors.setdefault(one.name, one) for one in outputs)
        operators.append(FileOperator(node.op_type, inputs, outputs))
    return File(
        tuple(operators),
        tuple(tensors[one.name] for one in given.graph.input),
        tuple(tensors[one.name] for one in given.graph.output),
        len(data),
    )


def _errors() -> tuple[type[Exception], ...]:
    """Exceptions of onnxruntime, which have no common base class."""
    state = package("onnxruntime.capi.onnxruntime_pybind11_state")
    names = (
        "Fail",
        "InvalidArgument",
        "InvalidGraph",
        "InvalidProtobuf",
        "NotImplemented",
        "RuntimeException",
    )
    return tuple(getattr(state, name) for name in names)


def _tensors(onnx: Any, model: Any) -> dict[str, Tensor]:
    """Inputs, outputs and intermediate values of a file, by name."""
    grids, graph = parameters(onnx, model), model.graph
    found = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        shape = tuple(int(n.dim_value) for n in kind.shape.dim)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        scale, zero_point, axis = grids.get(info.name, (None, None, 0))
        found[info.name] = Tensor(
            info.name, shape, dtype, scale, zero_point, axis, None
        )
    return found


def constants(onnx: Any, model: Any) -> dict[str, np.ndarray]:
    """Constant arrays of a file, by name."""
    to_array = onnx.numpy_helper.to_array
    return {one.name: to_array(one) for one in model.graph.initializer}


def _output(
    onnx: Any, node: Any, name: str, inputs: tuple[Tensor | None, ...]
) -> Tensor:
    """An output of the optimized graph, with inferred dtype and unknown shape."""
    dtype = _GIVE.get(node.op_type)
    if node.op_type == "Cast":
        (to,) = (one.i for one in node.attribute if one.name == "to")
        dtype = onnx.helper.tensor_dtype_to_np_dtype(to).name
    if dtype is None:
        typed_by = inputs[_TYPED_BY.get(node.op_type, 0)]
        dtype = "unknown" if typed_by is None else typed_by.dtype
    return Tensor(name, (), dtype, None, None, 0, None)


def parameters(onnx: Any, model: Any) -> dict[str, tuple[np.ndarray, np.ndarray, int]]:
    """Scale, zero point and axis of each quantized array, by name."""
    arrays, found = constants(onnx, model), {}
    for node in model.graph.node:
        if node.op_type not in _SCALING:
            continue
        is_made = node.op_type == "QuantizeLinear"
        name = node.output[0] if is_made else node.input[0]
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        scale, zero_point = (arrays[i].reshape(-1) for i in node.input[1:3])
        found[name] = (scale, zero_point.astype(np.int64), axis)
    return found

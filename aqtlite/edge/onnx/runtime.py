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
    "ConvInteger": "int32",
    "DequantizeLinear": "float32",
    "DynamicQuantizeLinear": "uint8",
    "Equal": "bool",
    "Greater": "bool",
    "GreaterOrEqual": "bool",
    "Less": "bool",
    "LessOrEqual": "bool",
    "MatMulInteger": "int32",
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
        OSError: if there is no room for the file that onnxruntime writes.
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
            _check_room(path, len(data))
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


def _check_room(path: pathlib.Path, size: int) -> None:
    """Checks that it is not for want of room that onnxruntime failed.

    It writes the optimized file, of which a full disk is only "Protobuf serialization
    failed"; what it has written by then stays, and does not grow any more either.

    Args:
        path: path of the file.
        size: number of bytes to add to it.

    Raises:
        OSError: if they cannot be added.
    """
    try:
        with path.open("ab") as file:
            file.write(bytes(size))
    except OSError as error:
        # Errors of writing have no path, which here is not the user's.
        raise OSError(error.errno, error.strerror, str(path)) from error


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


Parameters = dict[str, tuple[np.ndarray, np.ndarray, int]]
"""Scale, zero point and axis of quantized arrays, by name."""


def parameters(onnx: Any, model: Any) -> Parameters:
    """Scale, zero point and axis of each quantized array."""
    arrays, found = constants(onnx, model), dict[str, Any]()
    for node in model.graph.node:
        if node.op_type not in _SCALING:
            continue
        is_made = node.op_type == "QuantizeLinear"
        name = node.output[0] if is_made else node.input[0]
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        found[name] = _numbers(arrays, node.input[1], *node.input[2:3]), axis
    for node in model.graph.node:
        # Outputs of uint8 are the last activation under another name.
        if node.op_type == "Identity" and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    found.update(_of_integer_products(arrays, model.graph.node))
    return {name: (*numbers, axis) for name, (numbers, axis) in found.items()}


def _numbers(
    arrays: dict[str, np.ndarray], scale: str, zero_point: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points as vectors."""
    scales = arrays[scale].reshape(-1)
    if zero_point is None:
        return scales, np.zeros(scales.shape, np.int64)
    zero_points = arrays[zero_point].reshape(-1).astype(np.int64)
    return scales, np.broadcast_to(zero_points, scales.shape)


def _of_integer_products(
    arrays: dict[str, np.ndarray], nodes: Any
) -> dict[str, tuple[tuple[np.ndarray, np.ndarray], int]]:
    """Scales, zero points and axes of weights as `onnx.weights` writes them."""
    made = {name: node for node in nodes for name in node.output}
    users = {name: node for node in nodes for name in node.input}
    found = {}
    for node in nodes:
        weight, zero_point, last = node.input[:1], None, node
        if node.op_type in ("ConvInteger", "MatMulInteger"):
            weight = node.input[1:2]
            if weight[0] in made:
                weight = made[weight[0]].input[:1]
            zero_point = next(iter(node.input[3:4]), None)
            last = users[node.output[0]]
        elif node.op_type != "Cast" or weight[0] not in arrays:
            continue
        last = users.get(last.output[0])
        if last is not None and last.op_type == "Sub":
            zero_point, last = last.input[1], users[last.output[0]]
        if last is None or last.op_type != "Mul":
            continue
        scale = last.input[1]
        scale = made[scale].input[1] if scale in made else scale
        # A scale along an axis is shaped to broadcast, but for integer convolutions.
        axis = int(np.argmax(arrays[scale].shape)) if node.op_type == "Cast" else 0
        if node.op_type == "MatMulInteger":
            axis = arrays[weight[0]].ndim - 1
        found[weight[0]] = _numbers(arrays, scale, zero_point), axis
    return found

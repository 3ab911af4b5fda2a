"""The ONNX forms of contractions in float with frozen weights.

Which of them onnxruntime runs fast was measured: it turns DequantizeLinear and MatMul
into MatMulNBits, but repeats a DequantizeLinear before Conv at each call. A Cast and a
Mul it computes once, when it loads the file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Quantized
from aqtlite.edge.onnx.call import Call
from aqtlite.edge.onnx.writer import Array

_FLOATS = np.dtype(np.float32)

_TO = {"uint8": 2, "int8": 3}
"""Numbers of dtypes in ONNX."""


def product(call: Call, weight: Quantized) -> Array:
    """Adds a matrix product; returns its output.

    Args:
        call: the product; its first input is the activation.
        weight: the weight, [..., K, N].
    """
    (x, *_), name = call.inputs, f"{call.name}/product"
    if call.is_dynamic and weight.grid.block is None:
        weight = _raised(call, weight)
        integers = _integers(call, weight, weight.grid.dtype)
        zero_points = _zero_points(call, weight.grid.zero_point, _wide(weight))
        return _of_sums(
            call, "MatMulInteger", x, integers, zero_points, weight, call.shape, -1, {}
        )
    w = _dequantized(call, weight)
    made = call.writer.node("MatMul", [x.name, w], name)
    return Array(made, call.shape, _FLOATS)


def floats(call: Call, weight: Quantized) -> Array:
    """Adds the floats of a weight, which onnxruntime computes once; returns them."""
    writer, name, grid = call.writer, call.name, weight.grid
    shape = weight.qvalue.shape
    if grid.block is not None:
        return Array(_dequantized(call, weight), shape, _FLOATS)
    stored = Array(
        writer.frozen(weight.qvalue, grid.dtype, f"{name}/weight"), shape, grid.dtype
    )
    w = writer.node("Cast", [stored.name], f"{name}/cast", to=1)
    for operator, x in (("Sub", grid.zero_point), ("Mul", grid.scale)):
        if operator == "Mul" or np.any(x):
            along = _along(x, grid.axis, len(shape))
            known = writer.initializer(along, "float32", operator.lower())
            w = writer.node(operator, [w, known], f"{name}/{operator.lower()}")
    return Array(w, shape, _FLOATS)


def has_integer_conv(weight: Quantized, groups: int) -> bool:
    """Whether a ConvInteger is worth it: onnxruntime runs those of groups slowly."""
    grid = weight.grid
    is_narrow = grid.dtype != "int8" or grid.block is not None
    return groups == 1 and not is_narrow and not np.ndim(grid.zero_point)


def integer_conv(
    call: Call,
    x: Array,
    weight: Quantized,
    shape: Sequence[int],
    geometry: Mapping[str, Any],
) -> Array:
    """Adds a convolution of integers, without bias; returns its output.

    Args:
        call: the convolution.
        x: the activation, [N, C, H, W].
        weight: the weight, [C out, C in, H, W].
        shape: shape of the output.
        geometry: attributes of the convolution.
    """
    # onnxruntime's kernel of int8 weights is 3 to 5 times as slow as that of uint8.
    higher = _higher(weight)
    integers = _integers(call, higher, "uint8")
    zero_points = _zero_points(call, higher.grid.zero_point, "uint8")
    return _of_sums(
        call, "ConvInteger", x, integers, zero_points, weight, shape, -3, geometry
    )


def _of_sums(
    call: Call,
    operator: str,
    x: Array,
    integers: str,
    zero_points: Sequence[str],
    weight: Quantized,
    shape: Sequence[int],
    channels: int,
    attributes: Mapping[str, Any],
) -> Array:
    """Adds an operator that sums products of integers, and scales the sums."""
    writer, name = call.writer, call.name
    quantized, scale, zero_point = writer.dynamically_quantized(x)
    names = [quantized, integers, zero_point, *zero_points]
    sums = writer.node(operator, names, f"{name}/sums", **attributes)
    in_floats = writer.node("Cast", [sums], f"{name}/floats", to=1)
    of_weight = np.asarray(weight.grid.scale, np.float32)
    if of_weight.ndim:
        of_weight = of_weight.reshape(-1, *[1] * (-1 - channels))
    known = writer.initializer(of_weight, "float32", "scale")
    factor = writer.node("Mul", [scale, known], f"{name}/scale")
    made = writer.node("Mul", [in_floats, factor], f"{name}/product")
    return Array(made, tuple(shape), _FLOATS)


def _dequantized(call: Call, weight: Quantized) -> str:
    """Adds a weight and its DequantizeLinear; returns the name of the floats."""
    writer, name, grid = call.writer, call.name, weight.grid
    stored = writer.frozen(weight.qvalue, grid.dtype, f"{name}/weight")
    parameters = [writer.initializer(grid.scale, "float32", "scale")]
    if grid.block is None and grid.axis is not None and grid.dtype == "int8":
        # Its own, also of zeros: sessions with session.x64quantprecision change it.
        parameters.append(writer.zero_points(grid))
    elif np.any(grid.zero_point):
        parameters.append(writer.initializer(grid.zero_point, grid.dtype, "zero_point"))
    attributes = {} if grid.axis is None else {"axis": grid.axis}
    if grid.block is not None:
        attributes["block_size"] = grid.block
    inputs = [stored, *parameters]
    return writer.node("DequantizeLinear", inputs, f"{name}/dequantized", **attributes)


def _raised(call: Call, weight: Quantized) -> Quantized:
    """A weight as it is stored beside integers of activations."""
    is_raised = call.writer.is_raised(weight.qvalue, weight.grid.dtype)
    return _higher(weight) if is_raised else weight


def _higher(weight: Quantized) -> Quantized:
    """A weight of int8 as uint8, 128 higher."""
    return Quantized(weight.qvalue.astype(np.int16) + 128, weight.grid.in_uint8())


def _wide(weight: Quantized) -> str:
    """Dtype of 8 bits for the integers of a weight."""
    return "uint8" if weight.grid.dtype.startswith("u") else "int8"


def _integers(call: Call, weight: Quantized, dtype: str) -> str:
    """Adds integers in 8 bits; narrower ones are stored as such, and cast."""
    writer = call.writer
    stored = writer.frozen(weight.qvalue, dtype, f"{call.name}/weight")
    if dtype == _wide(weight):
        return stored
    return writer.node("Cast", [stored], f"{call.name}/cast", to=_TO[_wide(weight)])


def _zero_points(call: Call, zero_points: Any, dtype: str) -> list[str]:
    if not np.any(zero_points):
        return []
    return [call.writer.initializer(zero_points, dtype, "zero_point")]


def _along(x: Any, axis: int | None, rank: int) -> np.ndarray:
    """Numbers per channel, shaped to broadcast."""
    if not np.ndim(x):
        return np.asarray(x, np.float32)
    shape = [1] * rank
    shape[axis or 0] = -1
    return np.asarray(x, np.float32).reshape(shape)

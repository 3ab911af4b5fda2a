"""The ONNX forms of operators."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx import images, weights
from aqtlite.edge.onnx.call import Call, Form, clipped, number, plain
from aqtlite.edge.onnx.writer import Array, NotWritable, Writer, stored_grid
from aqtlite.edge.operators import arithmetic, contractions, layout, reductions, unary
from aqtlite.edge.operators.base import Activated, Operator


def _moved(call: Call, operator: str, *more: str) -> Array:
    """Adds an operator of one array with an output on the same grid."""
    (x,) = call.inputs
    return call.writer.apply(operator, [x], call.shape, x.grid, call.name, *more)


def _reshape(call: Call, operator: layout.Reshape) -> Array:
    return call.writer.reshape(call.inputs[0], operator.shape, call.name)


def _transpose(call: Call, operator: layout.Transpose) -> Array:
    return call.writer.transpose(call.inputs[0], operator.permutation, call.name)


def _broadcast_to(call: Call, operator: layout.BroadcastTo) -> Array:
    return _moved(call, "Expand", call.writer.indices(operator.shape))


def _slice(call: Call, operator: layout.Slice) -> Array:
    axes = range(len(operator.start))
    bounds = operator.start, operator.limit, axes, operator.strides
    return _moved(call, "Slice", *map(call.writer.indices, bounds))


def _pad(call: Call, operator: layout.Pad) -> Array:
    """Pads uint8 with the zero point, since onnxruntime would pad in float."""
    (x,), writer = call.inputs, call.writer
    pairs = operator.widths
    widths = writer.indices([low for low, _ in pairs] + [high for _, high in pairs])
    if x.grid is None or stored_grid(x.grid)[0] != "uint8":
        return _moved(call, "Pad", widths, number(writer, 0, x.dtype))
    dtype, zero_point = stored_grid(x.grid)
    zero = writer.initializer(zero_point, dtype, "zero_point")
    made = writer.node("Pad", [x.name, widths, zero], call.name)
    return dataclasses.replace(x, name=made, shape=call.shape)


def _concatenate(call: Call, operator: layout.Concatenate) -> Array:
    return call.write("Concat", call.inputs, axis=operator.axis)


def _take(call: Call, operator: layout.Take) -> Array:
    (x, indices), writer, axis = call.inputs, call.writer, operator.axis
    size = x.shape[axis]
    if indices.known is not None:
        known = np.clip(indices.known.astype(np.int64), 0, size - 1)
        indices = writer.constant(known, "indices")
    else:
        if indices.dtype not in (np.int32, np.int64):
            indices = writer.cast(indices, np.int64, f"{call.name}/indices")
        # ONNX counts negative indices from the end, and refuses indices out of bounds.
        ends = [number(writer, end, indices.dtype) for end in (0, size - 1)]
        name = f"{call.name}/inside"
        indices = writer.apply("Clip", [indices], indices.shape, None, name, *ends)
    more = indices.name
    return writer.apply("Gather", [x], call.shape, x.grid, call.name, more, axis=axis)


def _subtract(call: Call, _: Any) -> Array:
    """``x + (-y)``, since onnxruntime has integer addition but no subtraction.

    The bitwise complement of q is ``-1 - q``, which represents -y exactly with the zero
    point ``-1 - z``.
    """
    x, y = call.inputs
    of_y = y.grid
    if of_y is None or not _is_uint8(of_y):
        return call.write("Sub", [x, y])
    turned = call.writer.node("BitwiseNot", [y.name], f"{y.name}/negative")
    grid = dataclasses.replace(of_y, zero_point=-1 - of_y.zero_point)
    return call.write("Add", [x, dataclasses.replace(y, name=turned, grid=grid)])


def _to_float(call: Call, _: Any) -> Array:
    return call.writer.cast(call.inputs[0], np.float32, call.name)


def _clip(call: Call, operator: arithmetic.Clip) -> Array:
    (x,) = call.inputs
    if call.grid is not None:
        x = _rescale(call, operator)
    if not np.issubdtype(x.dtype, np.floating):
        ends = [
            "" if math.isinf(end) else number(call.writer, end, x.dtype)
            for end in (operator.low, operator.high)
        ]
        return call.writer.apply("Clip", [x], x.shape, None, call.name, *ends)
    return clipped(call, x, operator.low, operator.high)


def _rescale(call: Call, _: Any) -> Array:
    """Rescales by a concatenation of one array, which has an integer form.

    onnxruntime would merge two successive quantizations into one, in float.
    """
    (x,), writer = call.inputs, call.writer
    if call.grid is None:
        return x
    if not (_is_uint8(x.grid) and _is_uint8(call.grid)):
        return writer.quantize(writer.floats(x), x.shape, call.grid, call.name)
    vector = writer.reshape(x, x.shape or (1,), f"{call.name}/vector")
    y = writer.apply("Concat", [vector], vector.shape, call.grid, call.name, axis=0)
    return writer.reshape(y, x.shape, f"{call.name}/scalar")


def _extreme(name: str) -> Form:
    """The form of maximum or minimum.

    With a known scalar it is a clip of integers, the only integer form in onnxruntime.
    """
    place = ("Max", "Min").index(name)

    def form(call: Call, _: Any) -> Array:
        for x, bound in (call.inputs, call.inputs[::-1]):
            if _is_uint8(x.grid) and bound.is_stored and not bound.shape:
                ends = [bound.name if i == place else "" for i in range(2)]
                made = call.writer.node("Clip", [x.name, *ends], call.name)
                return dataclasses.replace(x, name=made)
        return call.write(name, call.inputs)

    return form


def _is_uint8(grid: Grid | None) -> bool:
    return grid is not None and stored_grid(grid)[0] == "uint8"


_UNARY: dict[str, Form] = {
    "abs": plain("Abs"),
    "exp": plain("Exp"),
    "gelu": plain("Gelu", approximate="tanh"),
    "hard_swish": plain("HardSwish"),
    "log": plain("Log"),
    "logistic": plain("Sigmoid"),
    "sqrt": plain("Sqrt"),
    "tanh": plain("Tanh"),
}


def _unary(call: Call, operator: unary.Unary) -> Array:
    if operator.function == "rsqrt":
        (x,) = call.inputs
        root = call.writer.apply("Sqrt", [x], x.shape, None, f"{call.name}/sqrt")
        return call.write("Reciprocal", [root])
    if operator.function not in _UNARY:
        raise NotWritable(f"there is no form of {operator.function} in ONNX")
    return _UNARY[operator.function](call, operator)


def _leaky_relu(call: Call, operator: unary.LeakyRelu) -> Array:
    return call.write("LeakyRelu", call.inputs, alpha=operator.slope)


def _select(call: Call, _: Any) -> Array:
    condition, x, y = call.inputs
    writer = call.writer
    condition = writer.cast(condition, np.bool_, f"{call.name}/condition")
    names = [condition.name, writer.floats(x), writer.floats(y)]
    made = writer.node("Where", names, call.name)
    if call.grid is None:
        return Array(made, call.shape, x.dtype)
    return writer.quantize(made, call.shape, call.grid, f"{call.name}/rounded")


def _batch_matmul(call: Call, _: Any) -> Array:
    if call.weight is not None:
        return weights.product(call, call.weight)
    return call.write("MatMul", call.inputs)


def _fully_connected(call: Call, _: Any) -> Array:
    (x, *rest), writer, name = call.inputs, call.writer, call.name
    if call.weight is not None:
        y = weights.product(call, call.weight)
        for bias in rest:
            y = writer.apply("Add", [y, bias], y.shape, None, name)
        return y
    if call.grid is None:
        y = writer.apply("MatMul", [x, rest[0]], call.shape, None, f"{name}/product")
        for bias in rest[1:]:
            y = _plus_bias(writer, y, bias, name)
        return y
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    x = writer.reshape(x, rows, f"{name}/rows")
    y = writer.apply("Gemm", [x, *rest], (rows[0], call.shape[-1]), call.grid, name)
    return writer.reshape(y, call.shape, f"{name}/reshaped")


def _plus_bias(writer: Writer, y: Array, bias: Array, name: str) -> Array:
    """Adds a bias to a product of floats.

    onnxruntime makes a Gemm of a MatMul and an Add. After integers, it would quantize
    the float weight of the Gemm with one scale, so that the bias, negated, is
    subtracted there.
    """
    if not writer.has_integers:
        return writer.apply("Add", [y, bias], y.shape, None, name)
    # A constant, once the file is loaded.
    negative = writer.apply("Neg", [bias], bias.shape, None, f"{name}/negative")
    return writer.apply("Sub", [y, negative], y.shape, None, name)


def _mean(call: Call, operator: reductions.Mean) -> Array:
    """A mean as global pooling of an image of one column, which has an integer form."""
    if call.grid is None:
        return _reduce("ReduceMean")(call, operator)
    writer, name = call.writer, call.name
    x = _rows(writer, call.inputs[0], operator.axes, name)
    x = writer.reshape(x, (1, *x.shape, 1), f"{name}/image")
    y = writer.apply("GlobalAveragePool", [x], (1, x.shape[1], 1, 1), call.grid, name)
    return writer.reshape(y, call.shape, f"{name}/reshaped")


def _sum(call: Call, operator: reductions.Sum) -> Array:
    """A sum as a matrix product with ones, which has an integer form."""
    if call.grid is None:
        return _reduce("ReduceSum")(call, operator)
    writer, name = call.writer, call.name
    x = _rows(writer, call.inputs[0], operator.axes, name)
    # With an axis, like weights, the ones are stored as int8 and not as uint8.
    grid = Grid(np.ones(1, np.float32), axis=1)
    ones = writer.stored(np.ones((x.shape[1], 1)), grid, "ones")
    y = writer.apply("Gemm", [x, ones], (x.shape[0], 1), call.grid, name)
    return writer.reshape(y, call.shape, f"{name}/reshaped")


def _rows(writer: Writer, x: Array, axes: Sequence[int], name: str) -> Array:
    """Flattens x to two axes: the kept axes, and the given ones."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    x = writer.transpose(x, [*kept, *axes], f"{name}/moved")
    count = math.prod(x.shape[: len(kept)])
    return writer.reshape(x, (count, x.size // count), f"{name}/rows")


def _reduce(name: str) -> Form:
    def form(call: Call, operator: Any) -> Array:
        axes = call.writer.indices(operator.axes)
        return call.write(name, call.inputs, axes, keepdims=0)

    return form


FORMS: dict[type[Operator], Form] = {
    arithmetic.Add: plain("Add"),
    arithmetic.Clip: _clip,
    arithmetic.Divide: plain("Div"),
    arithmetic.Maximum: _extreme("Max"),
    arithmetic.Minimum: _extreme("Min"),
    arithmetic.Multiply: plain("Mul"),
    arithmetic.Subtract: _subtract,
    arithmetic.ToFloat: _to_float,
    contractions.BatchMatMul: _batch_matmul,
    contractions.Conv2D: images.conv,
    contractions.DepthwiseConv2D: images.conv,
    contractions.FullyConnected: _fully_connected,
    layout.BroadcastTo: _broadcast_to,
    layout.Concatenate: _concatenate,
    layout.Pad: _pad,
    layout.Rescale: _rescale,
    layout.Reshape: _reshape,
    layout.Select: _select,
    layout.Slice: _slice,
    layout.Take: _take,
    layout.Transpose: _transpose,
    reductions.AveragePool2D: images.pool("AveragePool"),
    reductions.MaxPool2D: images.pool("MaxPool"),
    reductions.Mean: _mean,
    reductions.ReduceMax: _reduce("ReduceMax"),
    reductions.ReduceMin: _reduce("ReduceMin"),
    reductions.Sum: _sum,
    unary.LeakyRelu: _leaky_relu,
    unary.LogSoftmax: plain("LogSoftmax", axis=-1),
    unary.Softmax: plain("Softmax", axis=-1),
    unary.Unary: _unary,
}
"""Forms by operator class."""


def write(call: Call, operator: Operator) -> Array:
    """Adds an operator to a graph; returns the output.

    Raises:
        NotWritable: if the operator has no form in ONNX.
    """
    form = FORMS.get(type(operator))
    if form is None:
        raise NotWritable("there is no form of it in ONNX")
    made = form(call, operator)
    if isinstance(operator, Activated):
        return clipped(call, made, *operator.clamp)
    return made

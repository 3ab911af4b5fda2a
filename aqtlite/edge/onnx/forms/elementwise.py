"""Functions of one or two arrays, element by element, and softmax."""

import dataclasses
import math
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx.forms.base import Call, Form, clipped, number, plain
from aqtlite.edge.onnx.writer import Array, NotWritable, stored_grid
from aqtlite.edge.operators import arithmetic, layout, unary
from aqtlite.edge.operators.base import Operator


def _subtract(call: Call, _: Any) -> Array:
    """``x + (-y)``, since onnxruntime has an addition of integers alone.

    All bits of an integer turned over are ``-1 - q``, and with ``-1 - z`` as their zero
    point they stand for -y exactly.
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
    """A concatenation of one array, which has an integer form.

    Of two roundings that follow one another onnxruntime makes one, of floats.
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
    """The larger or the smaller of two values.

    With one known number it clips integers: onnxruntime has no other integer form.
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


FORMS: dict[type[Operator], Form] = {
    arithmetic.Add: plain("Add"),
    arithmetic.Clip: _clip,
    arithmetic.Divide: plain("Div"),
    arithmetic.ToFloat: _to_float,
    arithmetic.Maximum: _extreme("Max"),
    arithmetic.Minimum: _extreme("Min"),
    arithmetic.Multiply: plain("Mul"),
    arithmetic.Subtract: _subtract,
    layout.Rescale: _rescale,
    layout.Select: _select,
    unary.LeakyRelu: _leaky_relu,
    unary.LogSoftmax: plain("LogSoftmax", axis=-1),
    unary.Softmax: plain("Softmax", axis=-1),
    unary.Unary: _unary,
}

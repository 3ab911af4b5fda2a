"""Functions of one or two arrays, element by element, and softmax."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx.forms.base import Form, Output, clipped, number, plain
from aqtlite.edge.onnx.writer import Array, NotWritable, Writer, stored_grid
from aqtlite.edge.operators import arithmetic, layout, unary
from aqtlite.edge.operators.base import Operator


def _subtract(writer: Writer, _: Any, inputs: Sequence[Array], output: Output) -> Array:
    """``x + (-y)``, since onnxruntime has an addition of integers alone.

    All bits of an integer turned over are ``-1 - q``, and with ``-1 - z`` as their zero
    point they stand for -y exactly.
    """
    x, y = inputs
    of_y = y.grid
    if of_y is None or not _is_uint8(of_y):
        return plain("Sub")(writer, _, inputs, output)
    turned = writer.node("BitwiseNot", [y.name], f"{y.name}/negative")
    grid = dataclasses.replace(of_y, zero_point=-1 - of_y.zero_point)
    minus = dataclasses.replace(y, name=turned, grid=grid)
    return plain("Add")(writer, _, [x, minus], output)


def _to_float(writer: Writer, _: Any, inputs: Sequence[Array], output: Output) -> Array:
    return writer.cast(inputs[0], np.float32, output.name)


def _clip(
    writer: Writer, operator: arithmetic.Clip, inputs: Sequence[Array], output: Output
) -> Array:
    (x,) = inputs
    if output.grid is not None:
        x = _rescale(writer, operator, inputs, output)
    if not np.issubdtype(x.dtype, np.floating):
        ends = [
            "" if math.isinf(end) else number(writer, end, x.dtype)
            for end in (operator.low, operator.high)
        ]
        return writer.apply("Clip", [x], x.shape, None, output.name, *ends)
    return clipped(writer, x, operator.low, operator.high, output)


def _rescale(writer: Writer, _: Any, inputs: Sequence[Array], output: Output) -> Array:
    """A concatenation of one array, which has an integer form.

    Of two roundings that follow one another onnxruntime makes one, of floats.
    """
    (x,) = inputs
    if output.grid is None:
        return x
    if not (_is_uint8(x.grid) and _is_uint8(output.grid)):
        return writer.quantize(writer.floats(x), x.shape, output.grid, output.name)
    vector = writer.reshape(x, x.shape or (1,), f"{output.name}/vector")
    y = writer.apply("Concat", [vector], vector.shape, output.grid, output.name, axis=0)
    return writer.reshape(y, x.shape, f"{output.name}/scalar")


def _extreme(name: str) -> Form:
    """The larger or the smaller of two values.

    With one known number it clips integers: onnxruntime has no other integer form.
    """
    place = ("Max", "Min").index(name)

    def form(
        writer: Writer, operator: Any, inputs: Sequence[Array], output: Output
    ) -> Array:
        for x, bound in (inputs, inputs[::-1]):
            if _is_uint8(x.grid) and bound.is_stored and not bound.shape:
                ends = [bound.name if i == place else "" for i in range(2)]
                made = writer.node("Clip", [x.name, *ends], output.name)
                return dataclasses.replace(x, name=made)
        return plain(name)(writer, operator, inputs, output)

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


def _unary(
    writer: Writer, operator: unary.Unary, inputs: Sequence[Array], output: Output
) -> Array:
    if operator.function == "rsqrt":
        (x,) = inputs
        root = writer.apply("Sqrt", [x], x.shape, None, f"{output.name}/sqrt")
        return plain("Reciprocal")(writer, operator, [root], output)
    if operator.function not in _UNARY:
        raise NotWritable(f"there is no form of {operator.function} in ONNX")
    return _UNARY[operator.function](writer, operator, inputs, output)


def _leaky_relu(
    writer: Writer, operator: unary.LeakyRelu, inputs: Sequence[Array], output: Output
) -> Array:
    form = plain("LeakyRelu", alpha=operator.slope)
    return form(writer, operator, inputs, output)


def _select(writer: Writer, _: Any, inputs: Sequence[Array], output: Output) -> Array:
    condition, x, y = inputs
    name = f"{output.name}/condition"
    condition = writer.cast(condition, np.bool_, name)
    made = writer.node(
        "Where", [condition.name, writer.floats(x), writer.floats(y)], output.name
    )
    if output.grid is None:
        return Array(made, output.shape, x.dtype)
    return writer.quantize(made, output.shape, output.grid, f"{output.name}/rounded")


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

"""ONNX forms of untranslated equations: left in float by rule, or on indices."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.grid import Quantized
from aqtlite.edge.onnx import forms, images, sorting
from aqtlite.edge.onnx.call import Call, Form
from aqtlite.edge.onnx.writer import Array, NotWritable, Writer
from aqtlite.edge.operators import sorts
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.passes.translate import TRANSLATIONS
from aqtlite.edge.translation.base import Context, NotTranslatable


def write(
    writer: Writer,
    graph: Graph,
    known: Mapping[int, Any],
    node: Node,
    inputs: Sequence[Array],
    weight: Quantized | None = None,
) -> list[Array]:
    """Adds an equation to a graph; returns its outputs.

    Args:
        writer: writer of the graph.
        graph: graph of the equation.
        known: values that depend only on parameters and constants, by number.
        node: node of the equation.
        inputs: inputs of the equation.
        weight: frozen weight of a transposed convolution, if any.

    Raises:
        NotWritable: if the equation has no form in ONNX.
    """
    equation = node.operator
    assert isinstance(equation, Equation)
    name = "/".join(part for part in (node.path, equation.primitive) if part)
    inputs = [writer.in_floats(x) for x in inputs]
    if sorts.is_sort(equation):
        return sorting.write(writer, equation, inputs, name)
    form = FORMS.get(equation.primitive)
    if len(inputs) > 1 and images.is_transposed(equation, inputs[1]):
        form = images.conv_transpose
    if form is not None:
        aval = graph.values[node.output]
        call = Call(
            writer, inputs, aval.shape, np.dtype(aval.dtype), name, weight=weight
        )
        return [form(call, equation)]
    if equation.primitive not in TRANSLATIONS:
        raise NotWritable("there is no form of it in ONNX")
    try:
        return _translated(writer, graph, known, node, inputs, name)
    except NotTranslatable as error:
        # Quotients and powers have a form in floats that integers do not have.
        if equation.primitive not in _OF_FLOATS:
            raise NotWritable(str(error)) from error
    aval = graph.values[node.output]
    call = Call(writer, inputs, aval.shape, np.dtype(aval.dtype), name)
    return [_OF_FLOATS[equation.primitive](call, equation)]


def _translated(
    writer: Writer,
    graph: Graph,
    known: Mapping[int, Any],
    node: Node,
    inputs: Sequence[Array],
    name: str,
) -> list[Array]:
    """Adds the operators that the equation is translated to, in float or on indices."""
    constants = {i: np.asarray(known[i]) for i in node.inputs if i in known}
    builder = Builder(dataclasses.replace(graph, constants=constants))
    ctx = Context(builder, node, frozenset(constants))
    outputs = TRANSLATIONS[ctx.equation.primitive](ctx)
    arrays = dict(zip(node.inputs, inputs, strict=True))

    def read(value: int) -> Array:
        if value not in arrays:
            arrays[value] = writer.constant(builder.constants[value])
        return arrays[value]

    for one in builder.nodes:
        aval = builder.values[one.output]
        if all(i in builder.constants for i in one.inputs):
            of_known = [builder.constants[i] for i in one.inputs]
            builder.constants[one.output] = np.asarray(one.compute(of_known)[0])
            continue
        of_one = [read(i) for i in one.inputs]
        call = Call(writer, of_one, aval.shape, np.dtype(aval.dtype), name)
        arrays[one.output] = forms.write(call, one.operator)
    return [read(i) for i in outputs]


def _direct(operator: str, call: Call, _: Any) -> Array:
    return call.of_dtype(operator)


def _convert(call: Call, equation: Equation) -> Array:
    dtype = np.dtype(equation.params["new_dtype"])
    return call.writer.cast(call.inputs[0], dtype, call.name)


def _not_equal(call: Call, _: Any) -> Array:
    names = [x.name for x in call.inputs]
    equal = call.writer.node("Equal", names, f"{call.name}/equal")
    made = call.writer.node("Not", [equal], call.name)
    return Array(made, call.shape, call.dtype)


def _of_bits(of_bool: str, of_integers: str) -> Form:
    return lambda call, _: call.of_dtype(
        of_bool if call.inputs[0].dtype == np.bool_ else of_integers
    )


def _extreme(operator: str) -> Form:
    """The form of argmax or argmin."""

    def form(call: Call, equation: Equation) -> Array:
        (axis,) = equation.params["axes"]
        of_place = dataclasses.replace(
            call, name=f"{call.name}/int64", dtype=np.dtype(np.int64)
        )
        place = of_place.of_dtype(operator, axis=int(axis), keepdims=0)
        return call.writer.cast(place, equation.params["index_dtype"], call.name)

    return form


def _power(call: Call, equation: Equation) -> Array:
    exponent = np.asarray(equation.params["y"], np.float32)
    return call.of_dtype("Pow", call.writer.constant(exponent).name)


def _clamp(call: Call, _: Any) -> Array:
    low, x, high = call.inputs
    raised = call.writer.node("Max", [x.name, low.name], f"{call.name}/raised")
    made = call.writer.node("Min", [raised, high.name], call.name)
    return Array(made, call.shape, call.dtype)


def _cumsum(call: Call, equation: Equation) -> Array:
    axis = np.asarray(equation.params["axis"])
    name = call.writer.initializer(axis, "int64", "axis")
    return call.of_dtype("CumSum", name, reverse=int(equation.params["reverse"]))


_DIRECT = {
    "acos": "Acos",
    "asin": "Asin",
    "atan": "Atan",
    "ceil": "Ceil",
    "cos": "Cos",
    "cosh": "Cosh",
    "eq": "Equal",
    "erf": "Erf",
    "floor": "Floor",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "lt": "Less",
    "neg": "Neg",
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "tan": "Tan",
}
"""ONNX operators of the primitives that are a single operator."""

FORMS: dict[str, Form] = {
    **{
        primitive: functools.partial(_direct, operator)
        for primitive, operator in _DIRECT.items()
    },
    "and": _of_bits("And", "BitwiseAnd"),
    "argmax": _extreme("ArgMax"),
    "argmin": _extreme("ArgMin"),
    "convert_element_type": _convert,
    "cumsum": _cumsum,
    "ne": _not_equal,
    "not": _of_bits("Not", "BitwiseNot"),
    "or": _of_bits("Or", "BitwiseOr"),
    "xor": _of_bits("Xor", "BitwiseXor"),
}
"""Forms by primitive."""

_OF_FLOATS: dict[str, Form] = {
    "clamp": _clamp,
    "div": functools.partial(_direct, "Div"),
    "integer_pow": _power,
    "pow": functools.partial(_direct, "Pow"),
}
"""Forms by primitive, of equations that have no operators of integers."""

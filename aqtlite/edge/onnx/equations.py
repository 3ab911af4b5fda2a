"""Equations that stay as JAX traced them: of floats by rule, and of indices."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.onnx import operators, transposed
from aqtlite.edge.onnx.forms.base import Output
from aqtlite.edge.onnx.writer import Array, NotWritable, Writer
from aqtlite.edge.operators.equation import Equation
from aqtlite.edge.passes.translate import TRANSLATIONS
from aqtlite.edge.translation.base import NotTranslatable, Site, Translation


def write(
    writer: Writer,
    graph: Graph,
    known: Mapping[int, Any],
    node: Node,
    inputs: Sequence[Array],
) -> list[Array]:
    """Adds an equation to a graph; returns its outputs.

    Args:
        writer: writer of the graph.
        graph: that the equation is of.
        known: the values that depend on parameters and constants alone.
        node: the equation.
        inputs: inputs of the equation.

    Raises:
        NotWritable: if ONNX has no form of it.
    """
    equation = node.operator
    assert isinstance(equation, Equation)
    name = "/".join(part for part in (node.path, equation.primitive) if part)
    inputs = [_values(writer, x) for x in inputs]
    if equation.primitive in _DIRECT:
        operator = _DIRECT[equation.primitive]
        aval = graph.values[node.output]
        made = writer.node(operator, [x.name for x in inputs], name)
        return [Array(made, aval.shape, np.dtype(aval.dtype))]
    if equation.primitive in _FORMS:
        aval = graph.values[node.output]
        made = _FORMS[equation.primitive](writer, equation, inputs, name)
        return [Array(made, aval.shape, np.dtype(aval.dtype))]
    if len(inputs) > 1 and transposed.is_transposed(equation, inputs[1]):
        aval = graph.values[node.output]
        made = transposed.write(writer, equation, inputs, name)
        return [Array(made, aval.shape, np.dtype(aval.dtype))]
    if equation.primitive in TRANSLATIONS:
        translation = TRANSLATIONS[equation.primitive]
        return _translated(writer, graph, known, node, inputs, name, translation)
    raise NotWritable("there is no form of it in ONNX")


def _values(writer: Writer, x: Array) -> Array:
    return Array(writer.floats(x), x.shape, x.dtype, known=x.known)


def _translated(
    writer: Writer,
    graph: Graph,
    known: Mapping[int, Any],
    node: Node,
    inputs: Sequence[Array],
    name: str,
    translation: Translation,
) -> list[Array]:
    """The operators that the equation stands for, of floats or indices."""
    constants = {i: np.asarray(known[i]) for i in node.inputs if i in known}
    builder = Builder(dataclasses.replace(graph, constants=constants))
    try:
        outputs = translation(Site(builder, node, frozenset(constants)))
    except NotTranslatable as error:
        raise NotWritable(str(error)) from error
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
        output = Output(aval.shape, np.dtype(aval.dtype), None, name)
        of_one = [read(i) for i in one.inputs]
        arrays[one.output] = operators.write(writer, one.operator, of_one, output)
    return [read(i) for i in outputs]


def _convert(
    writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
) -> str:
    dtype = np.dtype(equation.params["new_dtype"])
    return writer.cast(inputs[0], dtype, name).name


def _not_equal(
    writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
) -> str:
    equal = writer.node("Equal", [x.name for x in inputs], f"{name}/equal")
    return writer.node("Not", [equal], name)


def _of_bits(of_bool: str, of_integers: str) -> Callable[..., str]:
    def form(
        writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
    ) -> str:
        operator = of_bool if inputs[0].dtype == np.bool_ else of_integers
        return writer.node(operator, [x.name for x in inputs], name)

    return form


def _extreme(operator: str) -> Callable[..., str]:
    """The place of the largest or smallest element."""

    def form(
        writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
    ) -> str:
        (axis,) = equation.params["axes"]
        (x,) = inputs
        shape = tuple(n for i, n in enumerate(x.shape) if i != axis)
        found = writer.node(
            operator, [x.name], f"{name}/int64", axis=int(axis), keepdims=0
        )
        place = Array(found, shape, np.dtype(np.int64))
        return writer.cast(place, equation.params["index_dtype"], name).name

    return form


def _cumsum(
    writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
) -> str:
    axis = writer.initializer(np.asarray(equation.params["axis"]), "int64", "axis")
    reverse = int(equation.params["reverse"])
    return writer.node("CumSum", [inputs[0].name, axis], name, reverse=reverse)


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
"""Primitives that are one operator of ONNX."""

_FORMS: dict[str, Callable[..., str]] = {
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
"""Primitives that are more than that."""

"""Grouping of values that share a grid, and rescaling where they cannot."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators.arithmetic import Add, Maximum, Subtract
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.layout import BroadcastTo, Rescale
from aqtlite.edge.rules import Rule


@dataclasses.dataclass(frozen=True)
class Group:
    """Values on one grid, because operators move elements between them."""

    members: tuple[int, ...]
    sources: tuple[int, ...]
    """Members that are not moved from other members."""

    dtype: str
    fixed: Grid | None = None
    """Grid that the runtime requires, if any."""


def rescale_inputs(graph: Graph, rule_of: Callable[[Node], Rule]) -> Graph:
    """Adds rescaling operators before operators that need inputs on another grid.

    These are operators with integers of another width, and operators on several values
    that have to share a grid when the grid of one value is fixed.
    """
    builder = Builder(graph)
    static = graph.static_values()
    dtypes: dict[int, str] = {}
    fixed: set[int] = set()
    for node in graph.nodes:
        operator, rule = node.operator, rule_of(node)
        is_equation = isinstance(operator, Equation)
        if static.issuperset(node.outputs) or is_equation or rule.is_float:
            builder.keep(node)
            continue
        inputs = []
        for value in node.inputs:
            is_computed = graph.is_float(value) and value not in static
            other_width = dtypes.get(value, "int8") != rule.activations
            is_bound = value in fixed and operator.moves_values and len(node.inputs) > 1
            if is_computed and (other_width or is_bound):
                if other_width and value not in graph.inputs:
                    value = _pinned(builder, value, node)
                value = builder.add(Rescale(rule.activations), [value], node.path)
            inputs.append(value)
        if rule.activations == "int16" and isinstance(operator, Add | Subtract):
            inputs = [_broadcast(builder, i, node) for i in inputs]
        builder.keep(dataclasses.replace(node, inputs=tuple(inputs)))
        dtypes[node.output] = rule.activations
        is_moved = operator.moves_values and inputs[0] in fixed
        if is_moved or operator.fixed_grid(rule.activations) is not None:
            fixed.add(node.output)
    return builder.build(graph)


def _pinned(builder: Builder, value: int, node: Node) -> int:
    """Adds an operator that changes nothing and has one grid for input and output.

    Without it, LiteRT's converter would let the operator before the rescaling give
    integers of the new width, and few kernels support mixed widths.
    """
    lowest = builder.constant(np.float32(np.finfo(np.float32).min))
    return builder.add(Maximum(), [value, lowest], node.path)


def _broadcast(builder: Builder, value: int, node: Node) -> int:
    """Broadcasts a value to a node's output: LiteRT adds only equal shapes in int16."""
    shape = builder.shape(node.output)
    if builder.shape(value) == shape:
        return value
    return builder.add(BroadcastTo(shape), [value], node.path)


def groups(graph: Graph, rule_of: Callable[[Node], Rule]) -> Mapping[int, Group]:
    """The group of every float that is computed from the inputs, by number."""
    static = graph.static_values()
    parent: dict[int, int] = {}

    def root(value: int) -> int:
        while parent.setdefault(value, value) != value:
            value = parent[value]
        return value

    moved_from: set[int] = set()
    dtypes: dict[int, str] = {}
    fixed: dict[int, Grid] = {}
    for node in graph.nodes:
        if static.issuperset(node.outputs):
            continue
        rule, of_floats = rule_of(node), [i for i in node.inputs if graph.is_float(i)]
        for output in filter(graph.is_float, node.outputs):
            dtypes[output] = rule.activations
            if isinstance(node.operator, Rescale):
                dtypes[output] = node.operator.dtype
            root(output)
            grid = node.operator.fixed_grid(rule.activations)
            if grid is not None:
                fixed[output] = grid
        if node.operator.moves_values and not rule.is_float:
            if graph.is_float(node.output):
                moved_from.add(node.output)
                of_floats.append(node.output)
            for value in of_floats[1:]:
                parent[root(value)] = root(of_floats[0])
    members: dict[int, list[int]] = {}
    for value in (*graph.inputs, *parent):
        if graph.is_float(value) and value not in members.setdefault(root(value), []):
            members[root(value)].append(value)
    found = {}
    for values in members.values():
        values.sort()
        group = Group(
            tuple(values),
            tuple(value for value in values if value not in moved_from),
            next((dtypes[v] for v in values if v in dtypes), "int8"),
            next((fixed[v] for v in values if v in fixed), None),
        )
        found.update(dict.fromkeys(values, group))
    return found

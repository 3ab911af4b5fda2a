"""Removal of redundant operators."""

from typing import Any

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.layout import Reshape, Transpose


def simplify(graph: Graph) -> Graph:
    """Removes duplicate and trivial operators; merges adjacent layouts."""
    builder = Builder(graph)
    seen: dict[Any, int] = {}
    for node in graph.nodes:
        if isinstance(node.operator, Equation):
            builder.keep(node)
            continue
        inputs = tuple(map(builder.resolve, node.inputs))
        node = _merged(builder, Node(node.operator, inputs, node.outputs, node.path))
        if _changes_nothing(builder, node):
            builder.replace(node.output, node.inputs[0])
            continue
        key = node.operator, node.inputs
        if key in seen:
            builder.replace(node.output, seen[key])
        else:
            seen[key] = node.output
            builder.keep(node)
    return builder.build(graph)


def _merged(builder: Builder, node: Node) -> Node:
    """Merges a reshape or transposition with one directly before it."""
    before = builder.producers.get(node.inputs[0])
    if before is None or type(before.operator) is not type(node.operator):
        return node
    if isinstance(node.operator, Reshape):
        return Node(node.operator, before.inputs, node.outputs, node.path)
    if isinstance(node.operator, Transpose) and isinstance(before.operator, Transpose):
        first, second = before.operator.permutation, node.operator.permutation
        operator = Transpose(tuple(first[i] for i in second))
        return Node(operator, before.inputs, node.outputs, node.path)
    return node


def _changes_nothing(builder: Builder, node: Node) -> bool:
    if isinstance(node.operator, Reshape):
        return builder.shape(node.inputs[0]) == node.operator.shape
    if isinstance(node.operator, Transpose):
        permutation = node.operator.permutation
        return permutation == tuple(range(len(permutation)))
    return False

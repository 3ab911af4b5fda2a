"""Operators in float, in the forms that the converter gets right."""

from collections.abc import Sequence
from typing import Any

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.litert import equations, sorting, transposed
from aqtlite.edge.operators import sorts
from aqtlite.edge.operators.base import Operator, is_transposed_convolution


def check(deployed: Deployed) -> None:
    """Raises ValueError if LiteRT has no operator for an operation, in float or not."""
    graph, found = deployed.program.graph, []
    for node in graph.nodes:
        shape = graph.values[node.outputs[0]].shape
        why = transposed.refusal(node.operator, shape) or sorting.refusal(node.operator)
        if why is not None and node.outputs[0] not in deployed.known:
            found.append(f"{node.place}: {node.operator.name_in_rules}: {why}")
    if found:
        raise ValueError(
            "LiteRT has no operator for these operations, in float or not; leave them "
            "out of what is exported:\n  " + "\n  ".join(found)
        )


def operands(operator: Operator, inputs: Sequence[Any]) -> list[Any]:
    """Operands of an operator, as `compute` takes them."""
    return [transposed.dilated(operator, i, x) for i, x in enumerate(inputs)]


def compute(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Computes an operator in float.

    Args:
        node: node of the operator.
        inputs: its inputs, as `operands` returns them.
    """
    if is_transposed_convolution(node.operator):
        return transposed.compute(node.operator, inputs)
    if sorts.is_sort(node.operator):
        return sorting.compute(node.operator, inputs)
    if (form := equations.form_of(node.operator)) is not None:
        return [form(*inputs)]
    return node.compute(inputs)

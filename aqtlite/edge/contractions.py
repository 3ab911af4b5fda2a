"""What is asked of each contraction of a program, for the report of its file."""

from collections.abc import Callable

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.contractions import BatchMatMul, Weighted
from aqtlite.edge.report import Contraction

_PRIMITIVES = ("conv_general_dilated", "dot_general")


def reported(
    deployed: Deployed, runs_in: Callable[[Node], str | None]
) -> tuple[Contraction, ...]:
    """Returns the contractions of a program, in program order.

    Args:
        deployed: the program.
        runs_in: function from an operator to what the file runs it in; None if it is
            not found.
    """
    program = deployed.program
    return tuple(
        Contraction(
            program.names[node.output],
            node.operator.name_in_rules,
            _asked(deployed, node),
            runs_in(node) or "float32",
        )
        for node in program.graph.nodes
        if _is_contraction(node) and node.output not in program.static
    )


def _is_contraction(node: Node) -> bool:
    operator = node.operator
    if isinstance(operator, Equation):
        return operator.primitive in _PRIMITIVES
    return isinstance(operator, Weighted | BatchMatMul)


def _asked(deployed: Deployed, node: Node) -> str:
    weight = deployed.operands.get(node.output, {}).get(1)
    if weight is None and node.output not in deployed.grids:
        return "float32"
    parts = []
    if deployed.program.is_quantized(node):
        parts.append(f"{deployed.program.rule_of(node).activations} activations")
    elif node.output in deployed.dynamic:
        parts.append("int8 activations by dynamic ranges")
    if weight is not None:
        grid = weight.grid
        size = "" if grid.block is None else f" in blocks of {grid.block}"
        parts.insert(0, f"{grid.dtype} weights{size}")
    return ", ".join(parts) or "float32"

"""Inverse square roots, in the operators that runtimes compute fast."""

from collections.abc import Callable

import numpy as np

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators.arithmetic import Multiply
from aqtlite.edge.operators.unary import Unary
from aqtlite.edge.rules import Rule

_INVERSE_ROOT = Unary("rsqrt")


def as_exponentials(graph: Graph, rule_of: Callable[[Node], Rule]) -> Graph:
    """Computes inverse square roots as ``exp(-0.5 * log(x))``.

    LiteRT's RSQRT of int8 iterates in fixed point, 60 ns for each value, where LOG and
    EXP look up a table. Roots that a rule leaves in float, or computes in int16, where
    RSQRT is a table, are unchanged.

    Args:
        graph: graph of operators.
        rule_of: function that returns the rule of a node.
    """
    builder, static = Builder(graph), graph.static_values()
    for node in graph.nodes:
        rule = rule_of(node)
        is_kept = rule.is_float or rule.activations != "int8"
        if node.operator != _INVERSE_ROOT or node.output in static or is_kept:
            builder.keep(node)
            continue
        (x,) = (builder.resolve(value) for value in node.inputs)
        half = builder.constant(np.float32(-0.5))
        logarithm = builder.add(Unary("log"), (x,), node.path)
        product = builder.add(Multiply(), (logarithm, half), node.path)
        builder.replace(node.output, builder.add(Unary("exp"), (product,), node.path))
    return builder.build(graph)

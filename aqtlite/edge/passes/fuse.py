"""Activations as part of the operators before them, which then round once."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators import activation
from aqtlite.edge.operators.activation import Activated
from aqtlite.edge.operators.arithmetic import Clip, Maximum, Minimum
from aqtlite.edge.operators.layout import Reshape, Transpose


def fuse_activations(graph: Graph, is_float: Callable[[Node], bool]) -> Graph:
    """Makes the clips that runtimes have as activations part of the operator before.

    Args:
        graph: graph of operators.
        is_float: tells of an operator whether it stays in float. What does, and what
            does not, are never made one.
    """
    builder = Builder(graph)
    producers, consumers = graph.producers(), graph.consumers()
    for node in graph.nodes:
        kind, before = None, []
        if isinstance(node.operator, Clip):
            kind = activation.of_limits(node.operator.low, node.operator.high)
            before = _fusing(node.inputs[0], producers, consumers)
        if isinstance(node.operator, Clip) and kind is None:
            builder.replace(node.output, _bounded(builder, node, node.operator))
            continue
        if before and is_float(before[0]) != is_float(node):
            before = []
        if kind is None or not before:
            builder.keep(node)
            continue
        first, *layouts = before
        fields: Any = first.operator
        operator = dataclasses.replace(fields, activation=kind)
        made = builder.add(operator, first.inputs, first.path)
        for layout in layouts:
            made = builder.add(layout.operator, [made], layout.path)
        builder.replace(node.output, made)
    return builder.build(graph)


def _bounded(builder: Builder, node: Node, clip: Clip) -> int:
    """Adds a clip to bounds that no activation has."""
    (x,) = node.inputs
    for bound, operator in ((clip.low, Maximum()), (clip.high, Minimum())):
        if math.isfinite(bound):
            known = builder.constant(np.float32(bound))
            x = builder.add(operator, [x, known], node.path)
    return builder.resolve(x)


def _fusing(
    value: int, producers: dict[int, Node], consumers: dict[int, list[Node]]
) -> list[Node]:
    """The operator that can take an activation, and the layouts behind it.

    Empty if there is none. The operator may have other consumers, too: then it is
    computed twice, as LiteRT's converter has it in any case.
    """
    path: list[Node] = []
    while value in producers:
        node = producers[value]
        path.insert(0, node)
        operator = node.operator
        if isinstance(operator, Activated):
            return path if operator.activation == "none" else []
        is_alone = len(consumers[value]) == 1
        if not isinstance(operator, Reshape | Transpose) or not is_alone:
            return []
        (value,) = node.inputs
    return []

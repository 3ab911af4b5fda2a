"""Translation of JAX equations to operators of a full-integer program."""

import re
from collections.abc import Callable

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators import sorts
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.rules import Rule
from aqtlite.edge.translation import contractions, elementwise, layout
from aqtlite.edge.translation.base import Context, NotTranslatable, Translation

TRANSLATIONS: dict[str, Translation] = {
    **contractions.TRANSLATIONS,
    **elementwise.TRANSLATIONS,
    **layout.TRANSLATIONS,
}
"""Translations by primitive."""


_COMPARED = "LiteRT's converter leaves comparisons of computed values in float"

_REASONS = {
    "argmax": "take it of the exported outputs: their integers have the same order",
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "ne"), _COMPARED),
}
"""Reasons why primitives have no translation, and advice, by primitive."""


def translate(graph: Graph, rule_of: Callable[[Node], Rule]) -> Graph:
    """Replaces float equations that depend on the inputs by operators.

    Args:
        graph: graph of equations and of operators recognised by `patterns`.
        rule_of: function that returns the rule of a node. An equation is kept if a rule
            for its primitive leaves it in float, or if any rule leaves it in float and
            it has no operator.

    Raises:
        ValueError: if other equations have no integer operator; the message names all
            of them.
    """
    builder = Builder(graph)
    static = graph.static_values()
    refused: dict[int, str] = {}
    for node in graph.nodes:
        rule = rule_of(node)
        is_named = rule.is_float and rule.op is not None
        if not _is_translated(graph, node, static) or is_named:
            builder.keep(node)
            continue
        try:
            outputs = tuple(_translated(Context(builder, node, static)))
        except NotTranslatable as error:
            if not rule.is_float:
                refused[node.outputs[0]] = str(error)
            builder.keep(node)
            continue
        for old, new in zip(node.outputs, outputs, strict=True):
            if old != new:
                builder.replace(old, new)
    built = builder.build(graph)
    # A refused equation is gone if its only consumers were replaced by a pattern.
    left = [node for node in built.nodes if node.outputs[0] in refused]
    if left:
        lines = [
            f"{node.place}: {node.operator.name_in_rules}: {refused[node.outputs[0]]}"
            for node in left
        ]
        rules = dict.fromkeys(
            f"edge.Rule(path={re.escape(node.path)!r}, "
            f"op={node.operator.name_in_rules!r}, is_float=True)"
            for node in left
            if not sorts.has_several_keys(node.operator)
        )
        message = (
            "these operations have no integer form; leave them out of what is "
            "exported, or in float by edge.Rule(path=..., is_float=True):\n  "
            + "\n  ".join(lines)
        )
        if rules:
            message += (
                "\nThe rules that leave these alone in float, before any others:\n  ["
                + ",\n   ".join(rules)
                + "]"
            )
        raise ValueError(message)
    return built


def _is_translated(graph: Graph, node: Node, static: frozenset[int]) -> bool:
    if not isinstance(node.operator, Equation) or static.issuperset(node.outputs):
        return False
    # Integer arithmetic, such as that of indices, is not translated.
    return any(graph.is_float(value) for value in (*node.inputs, *node.outputs))


def _translated(ctx: Context) -> list[int]:
    primitive = ctx.equation.primitive
    if sorts.has_several_keys(ctx.node.operator):
        raise NotTranslatable(
            f"{sorts.SEVERAL_KEYS}, in float or not: leave it out of what is exported"
        )
    if primitive not in TRANSLATIONS:
        why = _REASONS.get(primitive, "runtimes have no integer operator for it")
        raise NotTranslatable(why)
    return list(TRANSLATIONS[primitive](ctx))

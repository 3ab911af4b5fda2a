"""From equations of JAX to operators of a full-integer program."""

from collections.abc import Callable

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.rules import Rule
from aqtlite.edge.translation import contractions, elementwise, layout
from aqtlite.edge.translation.base import Context, NotTranslatable, Translation

TRANSLATIONS: dict[str, Translation] = {
    **contractions.TRANSLATIONS,
    **elementwise.TRANSLATIONS,
    **layout.TRANSLATIONS,
}
"""The translation of each primitive."""


_COMPARED = "LiteRT's converter leaves comparisons of computed values in float"

_REASONS = {
    "convert_element_type": (
        "it makes floats of integers or booleans that are computed; give the model "
        "floats, which are integers of the file in any case, and select by a mask with "
        "jnp.where"
    ),
    "argmax": "take it of the exported outputs: their integers have the same order",
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "ne"), _COMPARED),
}
"""Why there is none for some primitives, and what to do."""


def translate(graph: Graph, rule_of: Callable[[Node], Rule]) -> Graph:
    """Puts operators in place of the equations of floats that depend on inputs.

    Args:
        graph: graph of equations, and of operators that have been recognised.
        rule_of: says of an equation which integers. One that a rule for its primitive
            leaves in float stays as it is, and so does one without an operator that
            any rule leaves in float.

    Raises:
        ValueError: if there are equations without an operator of integers; it names
            all of them.
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
    # A pattern may have taken the place of what depended on a refused one.
    lines = [
        f"{node.place}: {node.operator.name_in_rules}: {refused[node.outputs[0]]}"
        for node in built.nodes
        if node.outputs[0] in refused
    ]
    if lines:
        raise ValueError(
            "these operations have no integer form; leave them out of what is "
            "exported, or in float by edge.Rule(path=..., is_float=True):\n  "
            + "\n  ".join(lines)
        )
    return built


def _is_translated(graph: Graph, node: Node, static: frozenset[int]) -> bool:
    if not isinstance(node.operator, Equation) or static.issuperset(node.outputs):
        return False
    # Arithmetic of indices stays as it is.
    return any(graph.is_float(value) for value in (*node.inputs, *node.outputs))


def _translated(ctx: Context) -> list[int]:
    primitive = ctx.equation.primitive
    if primitive not in TRANSLATIONS:
        why = _REASONS.get(primitive, "runtimes have no integer operator for it")
        raise NotTranslatable(why)
    return list(TRANSLATIONS[primitive](ctx))

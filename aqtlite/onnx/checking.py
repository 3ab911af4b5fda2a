"""Checks of graphs before they are imported: values, inputs of nodes, padding."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from aqtlite.extras import package
from aqtlite.onnx import registry

_PADDINGS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def check(
    proto: Any, opsets: Mapping[str, int], outer: AbstractSet[str] = frozenset()
) -> None:
    """Checks the nodes of an `onnx.GraphProto`, and those of its bodies.

    Args:
        proto: the graph.
        opsets: versions of the operators, by domain.
        outer: values of the graphs around it.

    Raises:
        ValueError: if a node reads a value that nothing before it gives, writes one
            that is there already, lacks an input, or has an unknown kind of padding.
    """
    given = {one.name for one in (*proto.input, *proto.initializer)}
    given |= {one.values.name for one in proto.sparse_initializer}
    for node in proto.node:
        text = f"{node.op_type} node {registry.name_of(node)!r}"
        for name in node.input:
            if name and name not in given and name not in outer:
                raise ValueError(
                    f"{text} reads {name!r}, which no node before it, input or "
                    "initializer gives"
                )
        _check_inputs(text, node, opsets)
        for attribute in node.attribute:
            if attribute.name == "auto_pad" and not node.domain:
                _check_padding(text, attribute.s.decode())
            if attribute.HasField("g"):
                check(attribute.g, opsets, given | outer)
        for name in filter(None, node.output):
            if name in given:
                raise ValueError(
                    f"{text} writes {name!r}, which another node, an input or an "
                    "initializer gives already"
                )
            given.add(name)
    for one in proto.output:
        if one.name not in given and one.name not in outer:
            raise ValueError(
                f"the graph {proto.name!r} returns {one.name!r}, which no node, input "
                "or initializer gives"
            )


def _check_inputs(text: str, node: Any, opsets: Mapping[str, int]) -> None:
    """Checks that inputs are there which ONNX requires of an operator."""
    defs = package("onnx").defs
    domain = registry.DOMAINS.get(node.domain, node.domain)
    version = opsets.get(domain, 1)
    if not defs.has(node.op_type, version, domain):
        return
    schema = defs.get_schema(node.op_type, version, domain)
    for position, one in enumerate(schema.inputs):
        is_required = one.option == defs.OpSchema.FormalParameterOption.Single
        if is_required and not "".join(node.input[position : position + 1]):
            raise ValueError(
                f"{text} has {len(node.input)} inputs, and lacks number {position}, "
                f"{one.name!r}"
            )


def _check_padding(text: str, kind: str) -> None:
    if kind not in _PADDINGS:
        raise ValueError(f"{text} has auto_pad={kind!r}; known: {', '.join(_PADDINGS)}")

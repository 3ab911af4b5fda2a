"""ONNX graphs as Python objects: nodes with attributes, constants, parameters."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from aqtlite.extras import package
from aqtlite.onnx import registry

OLDEST_OPSET = 7
"""Before, elementwise operators broadcast by attributes."""

_ADVICE = {
    "com.microsoft": "export the network again without optimization by onnxruntime",
    "ai.onnx.ml": "leave classical estimators out of the exported network",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation of a graph."""

    name: str
    op_type: str
    domain: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    operator: registry.Operator

    def __str__(self) -> str:
        return f"{self.op_type} node {self.name!r}"


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in the order of computation; also the body of a condition or a loop."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, np.ndarray]
    """Values that are known in tracing, by name."""

    parameters: Mapping[str, str]
    """Key of a parameter by name of a value."""


class Importer:
    """Makes graphs of one model, and gathers their parameters."""

    def __init__(self, opsets: Mapping[str, int], directory: str) -> None:
        """Args: version by domain, and the folder of external data."""
        self.parameters: dict[str, np.ndarray] = {}
        self._opsets = opsets
        self._directory = directory

    def graph(self, proto: Any, known: Mapping[str, np.ndarray] | None = None) -> Graph:
        """Returns a graph.

        Args:
            proto: `onnx.GraphProto`.
            known: inputs that become constants.
        """
        arrays = self._arrays(proto)
        uses = _uses(proto)
        names = [n for n, x in arrays.items() if _is_parameter(x, uses.get(n, []))]
        parameters = {name: self._add(name, arrays[name]) for name in names}
        constants = {n: x for n, x in arrays.items() if n not in parameters}
        constants.update(known or {})
        stored = {*constants, *parameters}
        nodes = [node for node in proto.node if node.op_type != "Constant"]
        return Graph(
            inputs=tuple(one.name for one in proto.input if one.name not in stored),
            outputs=tuple(one.name for one in proto.output),
            nodes=tuple(self._node(node) for node in nodes),
            constants=constants,
            parameters=parameters,
        )

    def _arrays(self, proto: Any) -> dict[str, np.ndarray]:
        """Initializers of a graph, and results of its constant nodes."""
        if proto.sparse_initializer:
            raise ValueError(
                f"the graph {proto.name!r} has sparse initializers, which are not "
                "supported: make them dense"
            )
        arrays = {one.name: self.array(one) for one in proto.initializer}
        for node in proto.node:
            if node.op_type == "Constant":
                arrays[node.output[0]] = self._constant(node)
        return arrays

    def _constant(self, node: Any) -> np.ndarray:
        (attribute,) = node.attribute
        value = self._attribute(attribute)
        if attribute.name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
        if isinstance(value, np.ndarray):
            return value
        raise ValueError(
            f"Constant node {node.name or node.output[0]!r} has {attribute.name!r}, "
            "which no array of JAX can hold"
        )

    def _add(self, name: str, array: np.ndarray) -> str:
        """Stores a parameter; returns a key that no other graph of the model uses."""
        key, number = name, 1
        while key in self.parameters:
            key, number = f"{name}#{number}", number + 1
        self.parameters[key] = array
        return key

    def _node(self, proto: Any) -> Node:
        name = proto.name or f"{proto.op_type}_{next(filter(None, proto.output), '')}"
        domain = registry.DOMAINS.get(proto.domain, proto.domain)
        operator = registry.find(domain, proto.op_type)
        if operator is None:
            raise unsupported([proto], self._opsets)
        return Node(
            name=name,
            op_type=proto.op_type,
            domain=domain,
            opset=self._opsets[domain],
            inputs=tuple(proto.input),
            outputs=tuple(proto.output),
            attributes={one.name: self._attribute(one) for one in proto.attribute},
            operator=operator,
        )

    def _attribute(self, proto: Any) -> Any:
        onnx = package("onnx")
        kinds = onnx.AttributeProto
        if proto.type == kinds.GRAPH:
            return self.graph(proto.g)
        if proto.type == kinds.TENSOR:
            return self.array(proto.t)
        value = onnx.helper.get_attribute_value(proto)
        if proto.type == kinds.STRING:
            return value.decode()
        if proto.type == kinds.STRINGS:
            return [one.decode() for one in value]
        if proto.type in (kinds.INTS, kinds.FLOATS):
            return list(value)
        return value

    def array(self, proto: Any) -> np.ndarray:
        """Returns the array of an `onnx.TensorProto`."""
        onnx = package("onnx")
        if proto.data_type == onnx.TensorProto.STRING:
            raise ValueError(
                f"the constant {proto.name!r} holds strings, which JAX does not have: "
                "leave text processing out of the exported network"
            )
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            (file,) = (
                one.value for one in proto.external_data if one.key == "location"
            )
            if not os.path.exists(os.path.join(self._directory, file)):
                raise FileNotFoundError(
                    f"the weight {proto.name!r} is in the file {file}, which is not in "
                    f"{self._directory or 'the working directory'}"
                )
        return onnx.numpy_helper.to_array(proto, base_dir=self._directory)


def _uses(proto: Any) -> dict[str, list[tuple[registry.Operator, int]]]:
    """Operators that read each value of a graph, and the positions of their inputs."""
    uses: dict[str, list[tuple[registry.Operator, int]]] = {}
    for node in proto.node:
        operator = registry.find(node.domain, node.op_type)
        for position, name in enumerate(node.input):
            if operator is not None:
                uses.setdefault(name, []).append((operator, position))
    return uses


def _is_parameter(
    array: np.ndarray, uses: Iterable[tuple[registry.Operator, int]]
) -> bool:
    """Whether a constant is a weight, in contrast to a number of a formula."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not is_float or any(position in one.static for one, position in uses):
        return False
    return array.size > 1 or any(position in one.weights for one, position in uses)


def unsupported(nodes: Iterable[Any], opsets: Mapping[str, int]) -> ValueError:
    """Error that names operators which are not registered."""
    found = {(node.domain, node.op_type): node for node in nodes}
    lines = [
        f"{name} (domain {domain or 'ai.onnx'!r}, opset {opsets.get(domain, '?')}, "
        f"node {node.name or node.output[0]!r})"
        for (domain, name), node in sorted(found.items(), key=lambda item: item[0])
    ]
    domains = {domain for domain, _ in found}
    advice = [text for domain, text in _ADVICE.items() if domain in domains]
    advice.append("aqtlite.onnx.operator registers a function of JAX for one")
    return ValueError(
        "the network has operators that aqtlite.onnx does not know: "
        f"{', '.join(lines)}; {', or '.join(advice)}"
    )


def walk(proto: Any) -> Iterator[Any]:
    """Iterates over the nodes of an `onnx.GraphProto`, and those of graphs inside."""
    for node in proto.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from walk(attribute.g)

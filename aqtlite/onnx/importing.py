"""Graphs from protocol buffers: what is a constant, and what is a parameter."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.extras import package
from aqtlite.onnx import registry
from aqtlite.onnx.evaluation import Call
from aqtlite.onnx.graph import Graph, Node

_LOGIC = {"And", "Cast", "Equal", "Greater", "Identity", "Less", "Not", "Or"}
"""Operators of which conditions are made, computed where operands are constants."""


class Importer:
    """Makes graphs of one model, and gathers their parameters."""

    def __init__(self, opsets: Mapping[str, int], directory: str) -> None:
        """Begins without parameters.

        Args:
            opsets: versions of the operators, by domain.
            directory: folder of external data.
        """
        self.parameters: dict[str, np.ndarray] = {}
        self._opsets = opsets
        self._directory = directory

    def graph(
        self,
        proto: Any,
        known: dict[str, np.ndarray],
        outer: Mapping[str, np.ndarray],
    ) -> Graph:
        """Returns a graph.

        Args:
            proto: `onnx.GraphProto`.
            known: inputs that become constants.
            outer: constants of the graphs around it.
        """
        arrays = self._arrays(proto)
        nodes = []
        for node in proto.node:
            if node.op_type == "DequantizeLinear" and {*node.input} <= {*arrays, ""}:
                arrays[node.output[0]] = self._dequantized(node, arrays)
            elif node.op_type != "Constant":
                nodes.append(node)
        uses = _uses(nodes)
        names = [name for name, x in arrays.items() if _is_weight(x, uses.get(name))]
        parameters = {name: self._add(name, arrays[name]) for name in names}
        outputs = tuple(one.name for one in proto.output)
        read = {*uses, *outputs} - {*parameters}
        constants = {name: x for name, x in arrays.items() if name in read} | known
        stored = {*arrays, *known}
        values = {**outer, **constants}
        return Graph(
            inputs=tuple(one.name for one in proto.input if one.name not in stored),
            outputs=outputs,
            nodes=tuple(self._computed(node, values) for node in nodes),
            constants=constants,
            parameters=parameters,
        )

    def _dequantized(self, proto: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Floats of a weight that the file has as integers and scales."""
        node = self._node(proto, arrays)
        inputs = [arrays[name] if name else None for name in node.inputs]
        return node.operator.function(Call(node, {}, {}), *inputs)

    def _computed(self, proto: Any, values: dict[str, np.ndarray]) -> Node:
        """Returns a node; adds its result to known values if it may be a condition."""
        node = self._node(proto, values)
        if node.op_type not in _LOGIC or node.domain:
            return node
        inputs = [values.get(name) for name in node.inputs]
        if all(x is not None and x.size == 1 for x in inputs):
            values[node.outputs[0]] = np.asarray(
                node.operator.function(Call(node, {}, {}), *inputs)
            )
        return node

    def _arrays(self, proto: Any) -> dict[str, np.ndarray]:
        """Initializers of a graph, and results of its constant nodes."""
        if proto.sparse_initializer:
            raise ValueError(
                f"the graph {proto.name!r} has sparse initializers, which are not "
                "supported: make them dense"
            )
        arrays = {one.name: self._tensor(one) for one in proto.initializer}
        for node in proto.node:
            if node.op_type == "Constant":
                arrays[node.output[0]] = self._constant(node)
        return arrays

    def _constant(self, node: Any) -> np.ndarray:
        (attribute,) = node.attribute
        value = self._attribute(attribute, {})
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

    def _node(self, proto: Any, values: Mapping[str, np.ndarray]) -> Node:
        domain = registry.DOMAINS.get(proto.domain, proto.domain)
        unused = ""  # The branch that a known condition does not take.
        if proto.op_type == "If" and proto.input[0] in values:
            is_true = values[proto.input[0]].reshape(()).item()
            unused = "else_branch" if is_true else "then_branch"
        return Node(
            name=registry.name_of(proto),
            op_type=proto.op_type,
            domain=domain,
            opset=self._opsets.get(domain, 1),
            inputs=tuple(proto.input),
            outputs=tuple(proto.output),
            attributes={
                one.name: self._attribute(one, values)
                for one in proto.attribute
                if one.name != unused
            },
            operator=registry.get(domain, proto.op_type),
        )

    def _attribute(self, proto: Any, values: Mapping[str, np.ndarray]) -> Any:
        onnx = package("onnx")
        kinds = onnx.AttributeProto
        if proto.type == kinds.GRAPH:
            return self.graph(proto.g, {}, values)
        if proto.type == kinds.TENSOR:
            return self._tensor(proto.t)
        value = onnx.helper.get_attribute_value(proto)
        if proto.type == kinds.STRING:
            return value.decode()
        if proto.type == kinds.STRINGS:
            return [one.decode() for one in value]
        if proto.type in (kinds.INTS, kinds.FLOATS):
            return list(value)
        return value

    def _tensor(self, proto: Any) -> np.ndarray:
        """Returns the array of an `onnx.TensorProto`."""
        onnx = package("onnx")
        if proto.data_type == onnx.TensorProto.STRING:
            raise ValueError(
                f"the constant {proto.name!r} holds strings, which JAX does not have: "
                "leave text processing out of the exported network"
            )
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(proto)
        return onnx.numpy_helper.to_array(proto)

    def _external(self, proto: Any) -> np.ndarray:
        """Returns the array of a tensor that is in a file of its own."""
        (file,) = (one.value for one in proto.external_data if one.key == "location")
        path = os.path.join(self._directory, file)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"the weight {proto.name!r} is in the file {file}, which is not in "
                f"{self._directory or 'the working directory'}"
            )
        to_array = package("onnx.numpy_helper").to_array
        try:
            return to_array(proto, base_dir=self._directory)
        except ValueError as error:
            raise ValueError(
                f"the weight {proto.name!r} is not in {path}, which may be cut off: "
                f"{error}"
            ) from error


def _uses(nodes: Iterable[Any]) -> dict[str, list[tuple[registry.Operator, int]]]:
    """Operators that read each value, in bodies too, and positions of their inputs."""
    uses: dict[str, list[tuple[registry.Operator, int]]] = {}
    for node in walk(nodes):
        if node.op_type != "Constant":
            operator = registry.get(node.domain, node.op_type)
            for position, name in enumerate(node.input):
                uses.setdefault(name, []).append((operator, position))
    return uses


def walk(nodes: Iterable[Any]) -> Iterator[Any]:
    """Iterates over nodes, and those of graphs inside."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from walk(attribute.g.node)


def _is_weight(
    array: np.ndarray, uses: Sequence[tuple[registry.Operator, int]] | None
) -> bool:
    """Whether a constant is a weight, in contrast to a number of a formula."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not is_float or not uses or any(p in one.static for one, p in uses):
        return False
    return array.size > 1 or any(p in one.weights for one, p in uses)

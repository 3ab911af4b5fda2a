"""Graphs of operators, the form in which passes rewrite programs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import errors
from aqtlite.edge.operators.base import Operator


@dataclasses.dataclass(frozen=True)
class Node:
    """An operator applied to values."""

    operator: Operator
    inputs: tuple[int, ...]
    """Numbers of the input values."""

    outputs: tuple[int, ...]
    path: str = ""
    """Name scopes around the operator."""

    @property
    def output(self) -> int:
        """The number of the output, of an operator with a single one."""
        (output,) = self.outputs
        return output

    @property
    def place(self) -> str:
        """Name scopes around the operator, for messages."""
        return errors.label(self.path)

    def compute(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Computes the outputs in float."""
        return self.operator.compute_all(*inputs)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A program without control flow: nodes in topological order."""

    values: tuple[jax.ShapeDtypeStruct, ...]
    """Abstract values of all values, by number."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    parameters: tuple[int, ...]
    """Numbers of the inputs that are parameters, known when the program is exported."""

    constants: Mapping[int, np.ndarray]
    outputs: tuple[int, ...]

    def is_float(self, value: int) -> bool:
        """Whether a value has a floating dtype."""
        return jnp.issubdtype(self.values[value].dtype, jnp.floating)

    def static_values(self) -> frozenset[int]:
        """The values that depend only on parameters and constants."""
        static = {*self.parameters, *self.constants}
        for node in self.nodes:
            if static.issuperset(node.inputs):
                static.update(node.outputs)
        return frozenset(static)

    def producers(self) -> dict[int, Node]:
        """The node that computes each value."""
        return {value: node for node in self.nodes for value in node.outputs}

    def consumers(self) -> dict[int, list[Node]]:
        """The nodes that use each value, and None if the value is an output."""
        found: dict[int, list[Any]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node)
        for value in self.outputs:
            found.setdefault(value, []).append(None)
        return found

    def without_unused(self) -> "Graph":
        """The graph without nodes that no output depends on."""
        needed, kept = set(self.outputs), []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
                kept.append(node)
        return dataclasses.replace(self, nodes=tuple(reversed(kept)))

    def evaluate(
        self,
        values: Mapping[int, Any],
        run: Callable[[Node, Sequence[Any]], Sequence[Any]],
    ) -> dict[int, Any]:
        """Runs the nodes in order.

        Args:
            values: inputs, parameters and any other known values, by number.
            run: function that maps a node and its inputs to its outputs.

        Returns:
            All values, by number.
        """
        known: dict[int, Any] = {**self.constants, **values}
        for node in self.nodes:
            if known.keys() >= set(node.outputs):
                continue
            outputs = run(node, [known[i] for i in node.inputs])
            known.update(zip(node.outputs, outputs, strict=True))
        return known


class Builder:
    """A graph under construction, from nothing or by a pass over another graph."""

    def __init__(self, graph: Graph | None = None):
        self.values: list[jax.ShapeDtypeStruct] = list(graph.values if graph else ())
        self.constants: dict[int, np.ndarray] = dict(graph.constants if graph else {})
        self.nodes: list[Node] = []
        self.producers: dict[int, Node] = {}
        self._renamed: dict[int, int] = {}

    def value(self, shape: Sequence[int], dtype: Any) -> int:
        """Adds a value."""
        self.values.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        return len(self.values) - 1

    def constant(self, array: Any) -> int:
        """Adds a constant."""
        array = np.asarray(array)
        number = self.value(array.shape, array.dtype)
        self.constants[number] = array
        return number

    def add(self, operator: Operator, inputs: Sequence[int], path: str = "") -> int:
        """Adds a node with a single output, of inferred shape and dtype; returns it."""
        resolved = tuple(map(self.resolve, inputs))
        made = jax.eval_shape(operator.compute, *(self.values[i] for i in resolved))
        output = self.value(made.shape, made.dtype)
        self.append(Node(operator, resolved, (output,), path))
        return output

    def append(self, node: Node) -> None:
        """Adds a node with outputs that are values of the graph already."""
        self.nodes.append(node)
        self.producers.update(dict.fromkeys(node.outputs, node))

    def keep(self, node: Node) -> None:
        """Adds a node of the old graph, with replaced values in its inputs."""
        inputs = tuple(map(self.resolve, node.inputs))
        self.append(dataclasses.replace(node, inputs=inputs))

    def replace(self, old: int, new: int) -> None:
        """Replaces a value by another in all nodes added from now on."""
        self._renamed[old] = new

    def resolve(self, value: int) -> int:
        """The replacement of a value, or the value itself."""
        while value in self._renamed:
            value = self._renamed[value]
        return value

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.values[self.resolve(value)].shape

    def build(self, like: Graph) -> Graph:
        """Finishes the graph, with the inputs and outputs of the graph `like`."""
        return self.finish(like.inputs, like.parameters, like.outputs)

    def finish(
        self, inputs: Iterable[int], parameters: Iterable[int], outputs: Iterable[int]
    ) -> Graph:
        """Finishes the graph, without nodes that no output depends on."""
        return Graph(
            tuple(self.values),
            tuple(self.nodes),
            tuple(inputs),
            tuple(parameters),
            self.constants,
            tuple(map(self.resolve, outputs)),
        ).without_unused()

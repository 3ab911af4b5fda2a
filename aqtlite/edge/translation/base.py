"""Shared parts of the translations of equations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aqtlite.edge.graph import Builder, Node
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.layout import Reshape, Slice, Transpose


class NotTranslatable(Exception):
    """An equation has no integer operator; the message says why."""


@dataclasses.dataclass(frozen=True)
class Context:
    """An equation to translate, and the graph to add its operators to."""

    builder: Builder
    node: Node
    static: frozenset[int]
    """The values that depend only on parameters and constants."""

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        return self.equation.params

    @property
    def equation(self) -> Equation:
        """The equation."""
        assert isinstance(self.node.operator, Equation)
        return self.node.operator

    @property
    def inputs(self) -> list[int]:
        """Inputs of the equation, as values of the new graph."""
        return [self.builder.resolve(i) for i in self.node.inputs]

    def is_static(self, index: int) -> bool:
        """Whether an input depends only on parameters and constants."""
        return self.node.inputs[index] in self.static

    def constant(self, index: int) -> np.ndarray | None:
        """The array of an input that is a constant, otherwise None."""
        return self.builder.constants.get(self.node.inputs[index])

    def uniform(self, index: int) -> float | None:
        """The value of all elements of a constant input; None if they differ."""
        array = self.constant(index)
        if array is None or not array.size:
            return None
        first = array.reshape(-1)[0]
        return float(first) if (array == first).all() else None

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.builder.shape(value)

    def producer(self, value: int) -> Node | None:
        """The node of the new graph that computes a value."""
        return self.builder.producers.get(self.builder.resolve(value))

    def add(self, operator: Any, *inputs: int) -> int:
        """Adds an operator; returns its output."""
        return self.builder.add(operator, inputs, self.node.path)

    def transpose(self, x: int, permutation: Sequence[int]) -> int:
        """Adds a transposition, unless it changes nothing."""
        if list(permutation) == list(range(len(permutation))):
            return x
        return self.add(Transpose(tuple(map(int, permutation))), x)

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        """Adds a reshape, unless it changes nothing."""
        if self.shape(x) == tuple(shape):
            return x
        return self.add(Reshape(tuple(map(int, shape))), x)

    def slice(
        self,
        x: int,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> int:
        """Adds a slice, unless it changes nothing."""
        step = (1,) * len(start) if strides is None else tuple(strides)
        if tuple(limit) == self.shape(x) and not any(start) and set(step) <= {1}:
            return x
        bounds = tuple(map(int, start)), tuple(map(int, limit))
        return self.add(Slice(*bounds, step), x)


Translation = Callable[[Context], Sequence[int]]
"""Function that adds the operators of an equation, and returns the outputs.

Raises:
    NotTranslatable: if the equation has no integer operators.
"""

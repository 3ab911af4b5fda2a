"""Fusion of known factors, summands and activations into the operators before them.

A batch normalization is a factor and a summand for each channel (Jacob et al. 2018,
arXiv:1712.05877, section 3.2), and a bias is a summand. A fused operator rounds once.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aqtlite.edge import weights
from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.masks import is_of_mask
from aqtlite.edge.operators.arithmetic import (
    FUSING,
    Add,
    Clip,
    Maximum,
    Minimum,
    Multiply,
    Subtract,
)
from aqtlite.edge.operators.base import Activated, activation_of
from aqtlite.edge.operators.contractions import Weighted
from aqtlite.edge.operators.layout import Reshape, Take, Transpose


def fold(graph: Graph, is_float: Callable[[Node], bool]) -> Graph:
    """Folds chains of known factors and summands into one factor and one summand.

    These are folded into the weight and bias of a contraction before the chain, if
    they vary only along its channels.

    Args:
        graph: graph of operators.
        is_float: function that tells whether an operator stays in float. Float and
            integer operators are never folded together.
    """
    builder, finder = Builder(graph), _Chains(graph, is_float)
    for node in graph.nodes:
        chain = finder.ending_in(node)
        if not chain:
            builder.keep(node)
            continue
        affine = _Affine(builder, chain[0].path)
        for link in chain:
            affine.apply(link, finder.base_of(link))
        base, output = finder.base_of(chain[0]), node.output
        before = finder.contraction_before(chain[0])
        made = None
        # A factor would change the integers of a frozen weight.
        if before and not (affine.has_factor and finder.has_frozen_weight(before[0])):
            made = affine.into(before, graph.values[base].shape)
        if made is not None:
            builder.replace(output, made)
        elif affine.count < len(chain):
            builder.replace(output, affine.after(base))
        else:
            # Folding would save nothing.
            builder.keep(node)
    return builder.build(graph)


class _Chains:
    """Finds chains of additions and multiplications (links) of known values."""

    def __init__(self, graph: Graph, is_float: Callable[[Node], bool]):
        self._is_float = is_float
        self._graph, self._static = graph, graph.static_values()
        self._producers, self._consumers = graph.producers(), graph.consumers()
        self._frozen = weights.values_of(graph)

    def base_of(self, node: Node) -> int:
        """The unknown operand of a link."""
        (base,) = (i for i in node.inputs if i not in self._static)
        return base

    def _is_link(self, node: Node | None) -> bool:
        if node is None or not isinstance(node.operator, FUSING):
            return False
        constants = [self._graph.constants.get(i) for i in node.inputs]
        if any(one is not None and is_of_mask(one) for one in constants):
            # Other summands would be lost in rounding when added to -1e9.
            return False
        unknown = [i for i in node.inputs if i not in self._static]
        shapes = {self._graph.values[i].shape for i in (*unknown, node.output)}
        return len(unknown) == 1 and len(shapes) == 1

    def _only_consumer(self, value: int) -> Node | None:
        consumers = self._consumers.get(value, [])
        return consumers[0] if len(consumers) == 1 else None

    def ending_in(self, node: Node) -> list[Node]:
        """The links of the chain that ends in a node; empty if none ends there."""
        if not self._is_link(node) or self._is_follower(
            node, self._only_consumer(node.output)
        ):
            return []
        chain = [node]
        while True:
            base = self.base_of(chain[0])
            before = self._producers.get(base)
            if before is None or not self._is_follower(chain[0], before):
                return chain
            if self._only_consumer(base) is None:
                return chain
            chain.insert(0, before)

    def _is_follower(self, node: Node, other: Node | None) -> bool:
        """Whether another operator is a link of the same kind, float or integer."""
        return (
            other is not None
            and self._is_link(other)
            and self._is_float(node) == self._is_float(other)
        )

    def contraction_before(self, link: Node) -> list[Node]:
        """The contraction before a link and the layouts between; empty if none fits."""
        path = _path_from(
            Weighted, self.base_of(link), self._producers, self._consumers
        )
        if not path or self._only_consumer(path[0].output) is None:
            return []
        is_known = path[0].inputs[1] in self._static
        is_alike = self._is_float(path[0]) == self._is_float(link)
        return path if is_known and is_alike else []

    def has_frozen_weight(self, contraction: Node) -> bool:
        """Whether the integers of a contraction's weight are given."""
        return contraction.inputs[1] in self._frozen


class _Affine:
    """``base * factor + summand``, with known factor and summand, None for 1 and 0."""

    def __init__(self, builder: Builder, path: str):
        self._builder, self._path = builder, path
        self._factor: int | None = None
        self._summand: int | None = None

    @property
    def count(self) -> int:
        """Number of operators needed without a contraction to fold into."""
        return (self._factor is not None) + (self._summand is not None)

    @property
    def has_factor(self) -> bool:
        """Whether the function multiplies."""
        return self._factor is not None

    def apply(self, link: Node, base: int) -> None:
        """Composes the function with a following link, in place."""
        (known,) = (i for i in link.inputs if i != base)
        if isinstance(link.operator, Multiply):
            self._factor = self._known(Multiply(), self._factor, known)
            if self._summand is not None:
                self._summand = self._known(Multiply(), self._summand, known)
            return
        if isinstance(link.operator, Subtract):
            minus = self._builder.constant(np.float32(-1))
            if link.inputs[0] == base:
                known = self._builder.add(Multiply(), [known, minus])
            else:
                self._factor = self._known(Multiply(), self._factor, minus)
                if self._summand is not None:
                    self._summand = self._known(Multiply(), self._summand, minus)
        self._summand = self._known(Add(), self._summand, known)

    def _known(self, operator: Add | Multiply, before: int | None, known: int) -> int:
        if before is None:
            return known
        return self._builder.add(operator, [before, known])

    def after(self, base: int) -> int:
        """Adds the function's operators after a value; returns the output."""
        made = base
        if self._factor is not None:
            made = self._builder.add(Multiply(), [made, self._factor], self._path)
        if self._summand is not None:
            made = self._builder.add(Add(), [made, self._summand], self._path)
        return made

    def into(self, before: list[Node], shape: tuple[int, ...]) -> int | None:
        """Adds a contraction with the function folded in; None if it does not fit."""
        contraction, *layouts = before
        x, w, *bias = map(self._builder.resolve, contraction.inputs)
        sums = self._builder.shape(contraction.output)
        vectors: list[int | None] = []
        for value in (self._factor, self._summand):
            if value is None:
                vectors.append(None)
                continue
            channels = _channels(
                self._builder.shape(value), shape, layouts, self._builder, sums
            )
            if channels is None:
                return None
            vectors.append(self._vector(value, channels))
        factor, summand = vectors
        if factor is not None:
            w = self._builder.add(Multiply(), [w, factor])
            bias = [self._builder.add(Multiply(), [b, factor]) for b in bias]
        if summand is not None:
            bias = [self._known(Add(), bias[0] if bias else None, summand)]
        operator, path = contraction.operator, contraction.path
        made = self._builder.add(operator, [x, w, *bias], path)
        return _laid_out(self._builder, made, layouts)

    def _vector(self, value: int, channels: np.ndarray) -> int:
        """Adds the vector of a value's elements for each channel."""
        size = int(np.prod(self._builder.shape(value)))
        flat = self._builder.add(Reshape((size,)), [value])
        indices = self._builder.constant(channels.astype(np.int32))
        return self._builder.add(Take(0), [flat, indices])


def _channels(
    of_value: tuple[int, ...],
    shape: tuple[int, ...],
    layouts: list[Node],
    builder: Builder,
    sums: tuple[int, ...],
) -> np.ndarray | None:
    """Finds the element of a value that applies to each channel of a contraction.

    Args:
        of_value: shape of the value.
        shape: shape that the value broadcasts to, after the layouts.
        layouts: reshapes and transpositions after the contraction.
        builder: builder with the shapes of all values.
        sums: shape of the contraction's output.

    Returns:
        Indices into the flat value; None if several elements apply to one channel.
    """
    numbers = np.arange(int(np.prod(of_value))).reshape(of_value)
    numbers = np.broadcast_to(numbers, shape)
    for node in reversed(layouts):
        if isinstance(node.operator, Transpose):
            numbers = numbers.transpose(np.argsort(node.operator.permutation))
        else:
            numbers = numbers.reshape(builder.shape(node.inputs[0]))
    rows = numbers.reshape(-1, sums[-1])
    return rows[0] if (rows == rows[0]).all() else None


def fuse_activations(graph: Graph, is_float: Callable[[Node], bool]) -> Graph:
    """Fuses clips to the range of an activation into the operators before them.

    Args:
        graph: graph of operators.
        is_float: function that tells whether an operator stays in float. Float and
            integer operators are never fused.
    """
    builder = Builder(graph)
    producers, consumers = graph.producers(), graph.consumers()
    for node in graph.nodes:
        if not isinstance(node.operator, Clip):
            builder.keep(node)
            continue
        activation = activation_of(node.operator.low, node.operator.high)
        if activation is None:
            builder.replace(node.output, _bounded(builder, node, node.operator))
            continue
        # An operator with other consumers is computed twice, as by LiteRT's converter.
        path = _path_from(Activated, node.inputs[0], producers, consumers)
        before: Any = path[0].operator if path else None
        if (
            before is None
            or before.activation != "none"
            or is_float(path[0]) != is_float(node)
        ):
            builder.keep(node)
            continue
        first, *layouts = path
        operator = dataclasses.replace(before, activation=activation)
        made = builder.add(operator, first.inputs, first.path)
        builder.replace(node.output, _laid_out(builder, made, layouts))
    return builder.build(graph)


def _bounded(builder: Builder, node: Node, clip: Clip) -> int:
    """Adds a clip to a range of no activation, as maximum and minimum."""
    (x,) = node.inputs
    for bound, operator in ((clip.low, Maximum()), (clip.high, Minimum())):
        if math.isfinite(bound):
            known = builder.constant(np.float32(bound))
            x = builder.add(operator, [x, known], node.path)
    return builder.resolve(x)


def _path_from(
    kind: type,
    value: int,
    producers: dict[int, Node],
    consumers: dict[int, list[Node]],
) -> list[Node]:
    """The operator of a kind that a value comes from, and the layouts after it.

    Empty if there is none, or if a value before a layout has other consumers.
    """
    path: list[Node] = []
    while value in producers:
        node = producers[value]
        path.insert(0, node)
        if isinstance(node.operator, kind):
            return path
        is_alone = len(consumers[value]) == 1
        if not isinstance(node.operator, Reshape | Transpose) or not is_alone:
            return []
        (value,) = node.inputs
    return []


def _laid_out(builder: Builder, value: int, layouts: list[Node]) -> int:
    """Adds layouts after a value; returns the output."""
    for layout in layouts:
        value = builder.add(layout.operator, [value], layout.path)
    return value

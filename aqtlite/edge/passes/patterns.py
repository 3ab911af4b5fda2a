"""Functions of JAX whose equations are recognised in a program.

A pattern is a function. It is traced at the shapes in question, and wherever its
equations occur in the program, something else takes their place: an operator that the
runtime has, or a function that suits integers better.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.edge import importing
from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators.base import Equation, Operator
from aqtlite.edge.operators.layout import Transpose
from aqtlite.edge.operators.unary import LogSoftmax, Softmax, Unary

Replacement = Callable[[Builder, int, str], int]
"""Adds something of a value, in a name scope; returns its output."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A function of one array, and what takes its place."""

    function: Callable[[jax.Array], Any]
    replacement: Replacement
    x: jax.ShapeDtypeStruct
    """Shape and dtype of the array."""


Candidates = Callable[[Graph, Node], Iterator[Pattern]]
"""Yields patterns that a node may be the last one of."""


def recognise(graph: Graph) -> Graph:
    """Replaces the patterns that occur in a graph."""
    builder = Builder(graph)
    producers = graph.producers()
    static = graph.static_values()
    for node in graph.nodes:
        found = None
        if isinstance(node.operator, Equation) and not static.issuperset(node.outputs):
            found = _replaced(builder, graph, producers, node)
        if found is None:
            builder.keep(node)
        else:
            builder.replace(node.output, found)
    return builder.build(graph)


def _replaced(
    builder: Builder, graph: Graph, producers: Mapping[int, Node], node: Node
) -> int | None:
    """The output of what takes the place of the pattern that ends in a node."""
    operator = node.operator
    assert isinstance(operator, Equation)
    for primitive, candidates in _PATTERNS:
        if operator.primitive != primitive or len(node.outputs) != 1:
            continue
        for pattern in candidates(graph, node):
            x = _match(graph, producers, node, pattern)
            if x is not None:
                return pattern.replacement(builder, builder.resolve(x), node.path)
    return None


def _match(
    graph: Graph, producers: Mapping[int, Node], node: Node, pattern: Pattern
) -> int | None:
    """The value whose function a node computes; None if it computes another."""
    traced = _traced(pattern.function, pattern.x.shape, pattern.x.dtype)
    if traced is None:
        return None
    of_pattern = traced.producers()
    (x,) = traced.inputs
    bound: dict[int, int] = {}

    def agree(wanted: int, value: int) -> bool:
        if wanted in bound:
            return bound[wanted] == value
        bound[wanted] = value
        if wanted == x:
            return graph.values[value] == traced.values[wanted]
        if wanted in traced.constants:
            return value in graph.constants and np.array_equal(
                traced.constants[wanted], graph.constants[value], equal_nan=True
            )
        one, other = of_pattern[wanted], producers.get(value)
        return (
            other is not None
            and _is_same(one, other)
            and all(map(agree, one.inputs, other.inputs))
        )

    (output,) = traced.outputs
    return bound.get(x) if agree(output, node.output) else None


def _is_same(one: Node, other: Node) -> bool:
    """Whether two nodes compute one function of their inputs."""
    first, second = one.operator, other.operator
    if not (isinstance(first, Equation) and isinstance(second, Equation)):
        return first == second and len(one.inputs) == len(other.inputs)
    return (
        first.primitive == second.primitive
        and len(one.inputs) == len(other.inputs)
        and str(first.params) == str(second.params)
    )


@functools.lru_cache(maxsize=4096)
def _traced(
    function: Callable[..., Any], shape: tuple[int, ...], dtype: Any
) -> Graph | None:
    x = jax.ShapeDtypeStruct(shape, dtype)
    graph, _ = importing.trace(lambda _, x: function(x), (), (x,))
    return graph if graph.nodes and graph.inputs else None


def _operator(operator: Operator) -> Replacement:
    return lambda builder, x, path: builder.add(operator, [x], path)


def _function(function: Callable[[jax.Array], Any]) -> Replacement:
    """Puts the equations of a function in place of a pattern."""

    def replacement(builder: Builder, x: int, path: str) -> int:
        closed = jax.make_jaxpr(function)(builder.values[x])
        (output,) = importing.inline(builder, closed, [x], path)
        return output

    return replacement


def _elementwise(
    function: Callable[[jax.Array], Any], replacement: Replacement
) -> Candidates:
    """A function whose input has the shape of the output."""

    def candidates(graph: Graph, node: Node) -> Iterator[Pattern]:
        yield Pattern(function, replacement, graph.values[node.output])

    return candidates


def _over_an_axis(function: Callable[..., Any], operator: Operator) -> Candidates:
    """Patterns over any one axis; the operator is over the last one."""

    @functools.cache
    def along(axis: int) -> Callable[[jax.Array], Any]:
        return lambda x: function(x, axis=axis)

    def candidates(graph: Graph, node: Node) -> Iterator[Pattern]:
        x = graph.values[node.output]
        rank = len(x.shape)
        for axis in reversed(range(rank)):
            yield Pattern(along(axis), _along(operator, axis, rank), x)

    return candidates


def _along(operator: Operator, axis: int, rank: int) -> Replacement:
    """Adds an operator over the last axis in place of one over another."""

    def replacement(builder: Builder, x: int, path: str) -> int:
        if axis == rank - 1:
            return builder.add(operator, [x], path)
        order = [i for i in range(rank) if i != axis] + [axis]
        moved = builder.add(Transpose(tuple(order)), [x], path)
        made = builder.add(operator, [moved], path)
        return builder.add(Transpose(tuple(np.argsort(order).tolist())), [made], path)

    return replacement


def _variance(graph: Graph, node: Node) -> Iterator[Pattern]:
    """The variance as the mean of squares less the square of the mean.

    It is the difference of two large numbers, of which integers of 8 bits leave
    nothing.
    """
    assert isinstance(node.operator, Equation)
    for producer in graph.nodes:
        operator = producer.operator
        if isinstance(operator, Equation) and operator.primitive == "reduce_sum":
            x = graph.values[producer.inputs[0]]
            axes = tuple(operator.params["axes"])
            if graph.values[producer.output].shape == graph.values[node.output].shape:
                is_clipped = node.operator.primitive == "max"
                fast, stable = _variances(axes, is_clipped)
                yield Pattern(fast, _function(stable), x)


@functools.cache
def _variances(
    axes: tuple[int, ...], is_clipped: bool
) -> tuple[Callable[[jax.Array], Any], Callable[[jax.Array], Any]]:
    def fast(x: jax.Array) -> jax.Array:
        square = jnp.square(jnp.mean(x, axes))
        difference = jnp.mean(jnp.square(x), axes) - square
        return jnp.maximum(0.0, difference) if is_clipped else difference

    def stable(x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x - jnp.mean(x, axes, keepdims=True)), axes)

    return fast, stable


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu_of_erf(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _elu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + (jnp.exp(jnp.minimum(x, 0.0)) - 1.0)


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))


_GELU = _operator(Unary("gelu"))
_PATTERNS: tuple[tuple[str, Candidates], ...] = (
    ("mul", _elementwise(_gelu, _GELU)),
    # At most 4.8e-4 from the function of tanh, which runtimes have.
    ("mul", _elementwise(_gelu_of_erf, _GELU)),
    ("mul", _elementwise(jax.nn.hard_swish, _operator(Unary("hard_swish")))),
    ("div", _elementwise(_gelu_of_erf, _GELU)),
    ("select_n", _elementwise(jax.nn.elu, _function(_elu))),
    ("select_n", _elementwise(jax.nn.softplus, _function(_softplus))),
    ("div", _over_an_axis(jax.nn.softmax, Softmax())),
    ("sub", _over_an_axis(jax.nn.log_softmax, LogSoftmax())),
    ("sub", _variance),
    ("max", _variance),
)
"""The last primitive of patterns, and the patterns that may end in a node."""

"""Recognition of JAX functions by their equations.

A pattern is a function, traced at the shapes in question. Where its equations occur in
a program, they are replaced by an operator of the runtime, or by an equivalent function
that is more accurate in integers.
"""

import dataclasses
import functools
import math
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
"""Function that adds the replacement, given a value and a name scope; returns it."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A function of one array, and the replacement."""

    function: Callable[[jax.Array], Any]
    replacement: Replacement
    x: jax.ShapeDtypeStruct
    """Abstract value of the array."""


Candidates = Callable[[Graph, Node], Iterator[Pattern]]
"""Function that yields the patterns that may end in a node."""


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
    """Adds the replacement of a pattern that ends in a node; None if none does."""
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
    """The value that a node applies the pattern to; None if it does not match."""
    if not _may_match(producers, node, pattern):
        return None
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


def _may_match(producers: Mapping[int, Node], node: Node, pattern: Pattern) -> bool:
    """Whether the primitives before a node are those of a pattern.

    They depend on the shape only by its axes of size one: to trace a pattern at few
    sizes and compare these spares tracing it at every size of a program.
    """
    shape = tuple(min(size, 2) for size in pattern.x.shape)
    traced = _traced(pattern.function, shape, pattern.x.dtype)
    if traced is None:
        return False
    of_pattern = traced.producers()
    (output,) = traced.outputs
    if output not in of_pattern or len(of_pattern[output].inputs) != len(node.inputs):
        return False
    for wanted, value in zip(of_pattern[output].inputs, node.inputs, strict=True):
        if wanted not in of_pattern:
            continue
        one, other = of_pattern[wanted].operator, producers.get(value)
        if other is None or one.name_in_rules != other.operator.name_in_rules:
            return False
    return True


def _is_same(one: Node, other: Node) -> bool:
    """Whether two nodes compute the same function of their inputs."""
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
    """A replacement by the equations of a function."""

    def replacement(builder: Builder, x: int, path: str) -> int:
        closed = jax.make_jaxpr(function)(builder.values[x])
        (output,) = importing.inline(builder, closed, [x], path)
        return output

    return replacement


def _elementwise(
    function: Callable[[jax.Array], Any], replacement: Replacement
) -> Candidates:
    """A single pattern for functions with an output of the input's shape."""

    def candidates(graph: Graph, node: Node) -> Iterator[Pattern]:
        yield Pattern(function, replacement, graph.values[node.output])

    return candidates


def _over_an_axis(function: Callable[..., Any], operator: Operator) -> Candidates:
    """Patterns over each axis, replaced by an operator over the last axis."""

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
    """A replacement by an operator over the last axis, with transpositions."""

    def replacement(builder: Builder, x: int, path: str) -> int:
        if axis == rank - 1:
            return builder.add(operator, [x], path)
        order = [i for i in range(rank) if i != axis] + [axis]
        moved = builder.add(Transpose(tuple(order)), [x], path)
        made = builder.add(operator, [moved], path)
        return builder.add(Transpose(tuple(np.argsort(order).tolist())), [made], path)

    return replacement


def _variance(graph: Graph, node: Node) -> Iterator[Pattern]:
    """Replaces variances computed as the mean of squares minus the squared mean.

    This difference of two large numbers is lost in 8-bit rounding.
    """
    assert isinstance(node.operator, Equation)
    for producer in graph.nodes:
        operator = producer.operator
        if isinstance(operator, Equation) and operator.primitive == "reduce_sum":
            x = graph.values[producer.inputs[0]]
            axes = tuple(operator.params["axes"])
            if graph.values[producer.output].shape == graph.values[node.output].shape:
                is_clipped = node.operator.primitive == "max"
                *written, stable = _variances(axes, is_clipped)
                for fast in written:
                    yield Pattern(fast, _function(stable), x)


@functools.cache
def _variances(
    axes: tuple[int, ...], is_clipped: bool
) -> tuple[Callable[[jax.Array], Any], ...]:
    """The variance as Flax writes it, as ONNX files do, and by squared deviations."""

    def clipped(difference: jax.Array) -> jax.Array:
        return jnp.maximum(0.0, difference) if is_clipped else difference

    def fast(x: jax.Array) -> jax.Array:
        square = jnp.square(jnp.mean(x, axes))
        return clipped(jnp.mean(jnp.square(x), axes) - square)

    def of_products(x: jax.Array) -> jax.Array:
        factor = np.float32(1) / np.float32(math.prod(x.shape[i] for i in axes))
        mean = jnp.sum(x, axes) * factor
        return clipped(jnp.sum(x * x, axes) * factor - mean * mean)

    def stable(x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x - jnp.mean(x, axes, keepdims=True)), axes)

    return fast, of_products, stable


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu_of_erf(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_of_products(x: jax.Array) -> jax.Array:
    """gelu by tanh as ONNX files of JAX models write it."""
    cube = x * (x * (0.044715 * x))
    return x * (0.5 * (1.0 + jnp.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + cube))))


def _softmax_of_reshapes(x: jax.Array, axis: int) -> jax.Array:
    """softmax as ONNX files of JAX models write it."""
    kept = [1 if i == axis else size for i, size in enumerate(x.shape)]
    largest = jnp.maximum(-jnp.inf, jnp.max(x, axis))
    exponentials = jnp.exp(x - largest.reshape(kept))
    return exponentials / jnp.sum(exponentials, axis).reshape(kept)


def _elu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + (jnp.exp(jnp.minimum(x, 0.0)) - 1.0)


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))


_GELU = _operator(Unary("gelu"))
_PATTERNS: tuple[tuple[str, Candidates], ...] = (
    ("mul", _elementwise(_gelu, _GELU)),
    ("mul", _elementwise(_gelu_of_products, _GELU)),
    # Differs by at most 4.8e-4 from the approximation by tanh, which runtimes have.
    ("mul", _elementwise(_gelu_of_erf, _GELU)),
    ("mul", _elementwise(jax.nn.hard_swish, _operator(Unary("hard_swish")))),
    ("div", _elementwise(_gelu_of_erf, _GELU)),
    ("select_n", _elementwise(jax.nn.elu, _function(_elu))),
    ("select_n", _elementwise(jax.nn.softplus, _function(_softplus))),
    ("div", _over_an_axis(jax.nn.softmax, Softmax())),
    ("div", _over_an_axis(_softmax_of_reshapes, Softmax())),
    ("sub", _over_an_axis(jax.nn.log_softmax, LogSoftmax())),
    ("sub", _variance),
    ("max", _variance),
)
"""Last primitive of a pattern, and the candidates for a node of that primitive."""

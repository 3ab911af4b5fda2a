"""Attention masks: elements that a softmax gives no weight.

A mask puts them far below all others: by a selection, or by adding -1e4, -1e9 or the
smallest number of float32. Integers whose range reaches down there have nothing left
for the other elements. How far below they lie does not matter, so ranges end where an
exponential is as good as zero.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.edge.graph import Graph, Node
from aqtlite.edge.operators.arithmetic import Add, Subtract
from aqtlite.edge.operators.base import Operator
from aqtlite.edge.operators.layout import BroadcastTo, Reshape, Select, Transpose
from aqtlite.edge.operators.unary import LogSoftmax, Softmax

MASKED_BELOW = -1e4
"""Known values down from here mask others."""

DISTANCE = 10.0
"""How far below the others masked elements are in a range: exp(-10) is 4.5e-5."""

_WEIGHTLESS = 17.0
"""exp(-17) is 4e-8, which added to 1 in float32 is lost."""


def is_of_mask(known: np.ndarray) -> bool:
    """Whether a known array is as large as what masks others."""
    return bool((np.abs(known) >= -MASKED_BELOW).any())


def is_softmax(operator: Operator) -> bool:
    """Whether an operator gives elements weights by their exponentials."""
    return isinstance(operator, Softmax | LogSoftmax)


def is_sum(operator: Operator) -> bool:
    """Whether an operator may add a mask."""
    return isinstance(operator, Add | Subtract) and operator.activation == "none"


def maskable(graph: Graph) -> frozenset[int]:
    """The values that are for softmaxes alone, before or behind a mask."""
    found: set[int] = set()
    consumers: dict[int, list[Any]] = graph.consumers()
    made = [value for node in reversed(graph.nodes) for value in node.outputs]
    for value in (*made, *graph.inputs):
        users = consumers.get(value, [None])
        if graph.is_float(value) and all(_passes(one, found) for one in users):
            found.add(value)
    return frozenset(found)


def _passes(user: Node | None, found: set[int]) -> bool:
    """Whether a consumer computes softmax weights of its input, or leads to one."""
    if user is None:
        return False
    moves = isinstance(user.operator, BroadcastTo | Reshape | Select | Transpose)
    return is_softmax(user.operator) or (
        (moves or is_sum(user.operator)) and user.output in found
    )


def counted(
    graph: Graph, known: Mapping[int, Any], values: frozenset[int]
) -> dict[int, jax.Array]:
    """Returns which elements have weight, as booleans.

    Args:
        graph: the program.
        known: floats of all values of the program.
        values: values that are `maskable`.
    """
    found: dict[int, jax.Array] = {}

    def add(value: int, counts: jax.Array) -> None:
        found[value] = found[value] | counts if value in found else counts

    for node in reversed(graph.nodes):
        if is_softmax(node.operator) and node.inputs[0] in values:
            add(node.inputs[0], _has_weight(known[node.inputs[0]]))
        if node.outputs[0] not in found:
            continue
        for value in values.intersection(node.inputs):
            add(value, _pulled(node, value, known, found[node.output]))
    return found


def _pulled(
    node: Node, value: int, known: Mapping[int, Any], counts: jax.Array
) -> jax.Array:
    """The elements of an input that those of the output come from."""

    def function(x: jax.Array) -> Any:
        inputs = [x if i == value else known[i] for i in node.inputs]
        return node.operator.compute(*inputs)

    # The function is linear: where its gradient is zero, nothing depends on x.
    _, pull = jax.vjp(function, jnp.zeros(jnp.shape(known[value])))
    (weights,) = pull(counts.astype(jnp.float32))
    found: jax.Array = weights != 0
    return found


def _has_weight(x: jax.Array) -> jax.Array:
    largest = jnp.max(x, -1, keepdims=True)
    return (x >= largest - _WEIGHTLESS) & _is_seen(largest)


def _is_seen(largest: jax.Array) -> jax.Array:
    """Returns which rows are not wholly masked, from their largest elements."""
    return largest > MASKED_BELOW / 2


def lowest_peak(x: jax.Array) -> jax.Array:
    """The smallest of the largest elements of rows of which others are masked.

    Args:
        x: the input of a softmax.

    Returns:
        A scalar; infinity if there is no such row.
    """
    peaks = jnp.max(x, -1)
    has_masked = ~jnp.all(_has_weight(x), -1) & _is_seen(peaks)
    return jnp.min(jnp.where(has_masked, peaks, jnp.inf), initial=jnp.inf)

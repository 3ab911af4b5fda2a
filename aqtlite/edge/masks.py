"""Attention masks: elements to which a softmax gives no weight.

Masked elements lie far below all others, by a selection or by an addition of -1e4, -1e9
or the smallest float32. A range that reached so far would round all other elements to
one integer. How far below they lie does not matter, so ranges end where the exponential
is practically zero.
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
"""Largest known value that counts as a mask."""

DISTANCE = 10.0
"""Distance of masked elements below the others in a range: exp(-10) is 4.5e-5."""

_WEIGHTLESS = 17.0
"""Distance from the maximum beyond which elements have no weight: exp(-17) is 4e-8,
which is lost when added to 1 in float32."""


def is_of_mask(known: np.ndarray) -> bool:
    """Whether a known array has elements as large in magnitude as those of masks."""
    return bool((np.abs(known) >= -MASKED_BELOW).any())


def is_softmax(operator: Operator) -> bool:
    """Whether an operator is a softmax or log-softmax."""
    return isinstance(operator, Softmax | LogSoftmax)


def is_sum(operator: Operator) -> bool:
    """Whether an operator may add a mask."""
    return isinstance(operator, Add | Subtract) and operator.activation == "none"


def maskable(graph: Graph) -> frozenset[int]:
    """The values that only softmaxes use, before or after masking."""
    found: set[int] = set()
    consumers: dict[int, list[Any]] = graph.consumers()
    made = [value for node in reversed(graph.nodes) for value in node.outputs]
    for value in (*made, *graph.inputs):
        users = consumers.get(value, [None])
        if graph.is_float(value) and all(_passes(one, found) for one in users):
            found.add(value)
    return frozenset(found)


def _passes(user: Node | None, found: set[int]) -> bool:
    """Whether a consumer is a softmax, or gives a value in `found`."""
    if user is None:
        return False
    moves = isinstance(user.operator, BroadcastTo | Reshape | Select | Transpose)
    return is_softmax(user.operator) or (
        (moves or is_sum(user.operator)) and user.output in found
    )


def counted(
    graph: Graph, known: Mapping[int, Any], values: frozenset[int]
) -> dict[int, jax.Array]:
    """Returns which elements get softmax weight, as boolean arrays by value.

    Args:
        graph: the program.
        known: floats of all values of the program, by number.
        values: values that may be masked, from `maskable`.
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
    """Which elements of an input contribute to the output elements in `counts`."""

    def function(x: jax.Array) -> Any:
        inputs = [x if i == value else known[i] for i in node.inputs]
        return node.operator.compute(*inputs)

    # The function is affine: elements of x with gradient zero do not contribute.
    _, pull = jax.vjp(function, jnp.zeros(jnp.shape(known[value])))
    (weights,) = pull(counts.astype(jnp.float32))
    found: jax.Array = weights != 0
    return found


def _has_weight(x: jax.Array) -> jax.Array:
    largest = jnp.max(x, -1, keepdims=True)
    return (x >= largest - _WEIGHTLESS) & _is_seen(largest)


def _is_seen(largest: jax.Array) -> jax.Array:
    """Which rows are not masked entirely, from their largest elements."""
    return largest > MASKED_BELOW / 2


def lowest_peak(x: jax.Array) -> jax.Array:
    """The smallest of the row maxima, over rows that are masked in part.

    Args:
        x: input of a softmax.

    Returns:
        A scalar; infinity if no row is masked in part.
    """
    peaks = jnp.max(x, -1)
    has_masked = ~jnp.all(_has_weight(x), -1) & _is_seen(peaks)
    return jnp.min(jnp.where(has_masked, peaks, jnp.inf), initial=jnp.inf)

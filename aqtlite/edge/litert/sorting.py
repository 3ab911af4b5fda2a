"""Sorts in float, by the one operator that LiteRT has for them, TOPK_V2.

The converter makes one of `lax.top_k` if its places are used, and otherwise a sort of
StableHLO, which the interpreter does not know.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.edge.operators import sorts
from aqtlite.edge.operators.base import Equation, Operator


def refusal(operator: Operator) -> str | None:
    """Why LiteRT has no such sort; None if it has."""
    if not sorts.is_sort(operator):
        return None
    assert isinstance(operator, Equation)
    key = operator.eqn.invars[0].aval
    if sorts.has_several_keys(operator):
        return sorts.SEVERAL_KEYS
    is_top_k = operator.primitive == "top_k"
    if not is_top_k and not jnp.issubdtype(key.dtype, jnp.floating):
        return f"it sorts {key.dtype.name}, and LiteRT sorts floats"
    return None


def compute(operator: Operator, inputs: Sequence[Any]) -> list[jax.Array]:
    """Computes a sort, or the largest elements, by the places of the latter."""
    assert isinstance(operator, Equation)
    params, (key, *_) = operator.params, inputs
    if operator.primitive == "top_k":
        axis = params["axis"]
        places = _places(key, axis, params["k"])
        return [_at(key, places, axis), jnp.moveaxis(places, -1, axis)]
    axis = params["dimension"]
    places = _places(-key, axis, key.shape[axis])
    return [_at(x, places, axis) for x in inputs]


def _places(key: jax.Array, axis: int, count: int) -> jax.Array:
    """The places of the largest elements along an axis, which becomes the last."""
    _, places = lax.top_k(jnp.moveaxis(key, axis, -1), count)
    return places


def _at(x: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """The elements of an array at places along an axis."""
    found = jnp.take_along_axis(
        jnp.moveaxis(x, axis, -1), places, -1, mode="promise_in_bounds"
    )
    return jnp.moveaxis(found, -1, axis)

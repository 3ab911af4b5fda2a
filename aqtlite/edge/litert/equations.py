"""Equations of JAX that the converter computes otherwise, in operators it gets right.

The converter (litert-converter 0.5.0) makes a floor modulo of a remainder, a power of a
cube root, and an arithmetic shift of a logical one, which differ for numbers below
zero; stores infinite constants as the largest finite float; and refuses to round to the
nearest integer away from zero.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.operators.base import Equation, Operator


def form_of(operator: Operator) -> Callable[..., jax.Array] | None:
    """Selects the function that computes an operator; None if the converter may."""
    if not isinstance(operator, Equation):
        return None
    dtype = operator.eqn.invars[0].aval.dtype
    is_rounding = operator.primitive == "round"
    if is_rounding and operator.params["rounding_method"] != _AWAY_FROM_ZERO:
        return None
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    if is_signed or jnp.issubdtype(dtype, jnp.floating):
        return _FORMS.get(operator.primitive)
    return None


_AWAY_FROM_ZERO = lax.RoundingMethod.AWAY_FROM_ZERO


def _rem(x: Any, y: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x - y * lax.div(x, y)
    return jnp.sign(x) * lax.rem(jnp.abs(x), jnp.abs(y))


def _cbrt(x: Any) -> jax.Array:
    return jnp.sign(x) * jnp.abs(x) ** np.asarray(1 / 3, x.dtype)


def _round(x: Any) -> jax.Array:
    size = jnp.abs(x)
    below = jnp.floor(size)
    half = np.asarray(0.5, x.dtype)
    return jnp.sign(x) * jnp.where(size - below >= half, below + 1, below)


def _shift_right_logical(x: Any, count: Any) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    shifted = lax.shift_right_logical(
        lax.bitcast_convert_type(x, unsigned), lax.bitcast_convert_type(count, unsigned)
    )
    return lax.bitcast_convert_type(shifted, x.dtype)


def _eq(x: Any, y: Any) -> jax.Array:
    """Takes infinite constants for numbers beyond all that are finite."""
    if not isinstance(y, np.ndarray):
        x, y = y, x
    if not isinstance(y, np.ndarray) or not np.isinf(y).any():
        return jnp.equal(x, y)
    largest = jnp.finfo(y.dtype).max
    is_beyond = jnp.where(y > 0, x > largest, x < -largest)
    return jnp.where(np.isinf(y), is_beyond, x == np.where(np.isinf(y), 0, y))


def _ne(x: Any, y: Any) -> jax.Array:
    return ~_eq(x, y)


_FORMS: Mapping[str, Callable[..., jax.Array]] = {
    "rem": _rem,
    "cbrt": _cbrt,
    "round": _round,
    "shift_right_logical": _shift_right_logical,
    "eq": _eq,
    "ne": _ne,
}

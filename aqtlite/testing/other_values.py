"""Other values of an array, as inputs that results should not depend on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LOUD = 20.0


def has_others(x: Any) -> bool:
    """Whether an array gets other values: numbers do, masks and random keys do not."""
    return any(
        jnp.issubdtype(x.dtype, kind) for kind in (jnp.inexact, jnp.integer)
    ) and bool(x.size)


def loud(x: Any, axis: int, where: np.ndarray) -> jax.Array:
    """Returns an array with values 20 times as large at some places along an axis.

    They are larger than any other, so that a range that they are part of moves.
    Integers stay within the range that occurs, since most are indices: they move by
    half of it.

    Args:
        x: the array.
        axis: the axis.
        where: the places, bool of the size of the axis.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _replaced(x, _shifted(x, half=True), axis, where)
    return _replaced(x, _LOUD * _rolled(x, axis), axis, where)


def plain(x: Any, axis: int, where: np.ndarray) -> jax.Array:
    """Returns an array with values of its own kind at some places along an axis.

    Floats are those of other places with the other sign; integers are next ones, within
    the range that occurs.

    Args:
        x: the array.
        axis: the axis.
        where: the places, bool of the size of the axis.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _replaced(x, _shifted(x, half=False), axis, where)
    return _replaced(x, _rolled(x, axis), axis, where)


def _rolled(x: Any, axis: int) -> jax.Array:
    return -jnp.roll(x, 1, axis)


def _shifted(x: Any, *, half: bool) -> np.ndarray:
    """Moves integers within their range, around its end."""
    values = np.asarray(x, object)  # The span of a dtype does not fit into it.
    low, high = values.min(), values.max()
    span = high - low + 1
    step = max(1, span // 2) if half else 1
    return (low + (values - low + step) % span).astype(x.dtype)


def _replaced(x: Any, values: Any, axis: int, where: np.ndarray) -> jax.Array:
    shape = [1] * x.ndim
    shape[axis] = where.size
    return jnp.where(where.reshape(shape), jnp.asarray(values, x.dtype), x)

"""Marks in a program that gathers statistics of the tokens that count.

The code that updates statistics asks which elements of an array count. While it is
traced, the answer is an array of True with a name; `aqtlite.program.masking` evaluates
the program and puts the mask of the array in its place.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from aqtlite.jaxpr import equations

_MARK = "aqtlite counted "

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_is_counting = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Lets `counted` return masks in what is traced."""
    with _is_counting(True):
        yield


def is_counting() -> bool:
    """Whether `counting` is in effect."""
    return bool(_is_counting.value)


def counted(x: jax.Array, name: str) -> jax.Array | None:
    """Returns which elements of an array count; None outside of `counting`.

    Args:
        x: array, perhaps with elements of tokens that do not count.
        name: description of the array, for messages.

    Returns:
        bool of the array's shape.
    """
    if not is_counting():
        return None
    # Made of the array, so that transformations map both alike.
    marked: jax.Array = checkpoint_name(jnp.logical_or(x == x, True), _MARK + name)
    return marked


def name_of(eqn: Any) -> str | None:
    """Returns the name that an equation of `counted` gives; None for another one."""
    if eqn.primitive is not primitives.name_p:
        return None
    return name_in(str(eqn.params["name"]))


def name_in(mark: str) -> str | None:
    """Returns the name in a mark of `counted`; None for another name."""
    return mark.removeprefix(_MARK) if mark.startswith(_MARK) else None


def like(
    function: Callable[[], jax.Array], float_result: jax.Array | None
) -> jax.Array:
    """Returns the result of a function, of which the elements count as of another one.

    The function becomes one equation, into which no mask is followed. It is traced
    outside of `counting`.

    Args:
        function: function of no arguments.
        float_result: array of the shape of the function's result; None if there is
            none, so that the mask of the result is lost.
    """

    def aqtlite_opaque() -> jax.Array:
        with _is_counting(False):
            return function()

    result: jax.Array = jax.jit(aqtlite_opaque)()
    if float_result is None:
        return result
    alike: jax.Array = jax.jit(aqtlite_like)(result, float_result)
    return alike


def aqtlite_like(result: jax.Array, float_result: jax.Array) -> jax.Array:
    """Returns the first array; the name of the equation says what it stands for."""
    del float_result
    return result


def is_opaque(eqn: Any) -> bool:
    """Whether an equation calls the function of `like`."""
    return equations.called_name(eqn) == "aqtlite_opaque"


def is_like(eqn: Any) -> bool:
    """Whether the result of an equation has the mask of its second input."""
    return equations.called_name(eqn) == aqtlite_like.__name__

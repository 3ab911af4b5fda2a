"""Gradients that cannot be given, and raise in place of being zero.

A value may stand for an array that is not at hand: frozen integers for a parameter, or
those of a cache for keys and values of earlier calls. Its gradient would be zero, and
whatever is trained by it would stay as it is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def refused(value: jax.Array, of: Any, message: str) -> jax.Array:
    """Returns a value, and refuses gradients with respect to what it was made of.

    Args:
        value: array to return; gradients with respect to it pass through.
        of: array that is not to be differentiated.
        message: text of the error.

    Raises:
        TypeError: if `of` is differentiated, in reverse mode.
    """
    return _refused(message, value, of)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _refused(message: str, value: jax.Array, of: jax.Array) -> jax.Array:
    del message, of
    return value


def _refused_fwd(message: str, value: Any, of: Any) -> tuple[jax.Array, None]:
    if of.perturbed:
        raise TypeError(message)
    return value.value, None


def _refused_bwd(message: str, residuals: None, g: Any) -> tuple[Any, None]:
    del message, residuals
    return g, None


_refused.defvjp(_refused_fwd, _refused_bwd, symbolic_zeros=True)


@jax.custom_jvp
def marked(value: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a value with a gradient, of zero, with respect to the float array `x`.

    The value is differentiated where `x` is, so that `refused` can tell.
    """
    del x
    return value


@marked.defjvp
def _marked_jvp(primals: Any, tangents: Any) -> Any:
    value, _ = primals
    return value, jnp.zeros_like(value) * jnp.sum(tangents[1]).astype(value.dtype)

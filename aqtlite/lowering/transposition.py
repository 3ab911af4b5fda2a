"""Transpositions of integers of 4 bits."""

import jax
import jax.numpy as jnp
from jax import lax


def transposed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Computes ``x.transpose(axes)`` for any dtype.

    XLA:GPU (jax 0.11.2) loses integers of 4 bits if a kernel writes them in another
    order than it reads them: they are transposed as int8, and narrowed by a separate
    kernel. All platforms take this form, so that analyses of a jaxpr see the
    permutation.
    """
    if x.dtype not in (jnp.int4, jnp.uint4) or not isinstance(x, jax.Array):
        return x.transpose(axes)
    wide = lax.optimization_barrier(x.astype(jnp.int8))
    return lax.optimization_barrier(wide.transpose(axes)).astype(x.dtype)

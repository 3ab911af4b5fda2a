"""Reductions that a CPU takes while it computes what is reduced.

XLA:CPU fuses a reduction of integers with its operand only up to a few terms, and one
of floats never: others read an array that was written to memory first. In two steps,
the first of 16 terms, no such array is needed; the second step reads what is left.
Results are the same as in one step, bit for bit.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.sharding import explicit_sharding

_TERMS = 16
_WORTHWHILE = 2**14  # elements


def wrapping_sum(x: jax.Array) -> jax.Array:
    """The sum over all elements of a uint32 array, modulo 2^32."""

    def at_once(x):
        return jnp.sum(x, dtype=jnp.uint32)

    def in_two_steps(x):
        flat = jnp.pad(x.reshape(-1), (0, -x.size % _TERMS))
        return at_once(jnp.sum(flat.reshape(_TERMS, -1), axis=0, dtype=jnp.uint32))

    if not _is_worthwhile(x):
        return at_once(x)
    return lax.platform_dependent(x, cpu=in_two_steps, default=at_once)


def largest_magnitude(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``max(|x|)`` over some axes of a float32 array, keepdims; 0 over an empty axis.

    A NaN makes its maximum NaN.
    """

    def at_once(x):
        return jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)

    def in_two_steps(x):
        # Without a sign, floats are in the order of their bits, and NaN is the last.
        bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        pieces = (_TERMS, x.shape[axis] // _TERMS)
        bits = bits.reshape(*x.shape[:axis], *pieces, *x.shape[axis + 1 :])
        return at_once(lax.bitcast_convert_type(bits.max(axis), jnp.float32))

    divisible = [a for a in axes if _is_worthwhile(x) and x.shape[a] % _TERMS == 0]
    if not divisible:
        return at_once(x)
    axis = max(divisible, key=lambda a: x.shape[a])
    return lax.platform_dependent(x, cpu=in_two_steps, default=at_once)


def _is_worthwhile(x: jax.Array) -> bool:
    is_known = all(isinstance(size, int) for size in x.shape)
    is_large = is_known and math.prod(x.shape) >= _WORTHWHILE
    # An axis with an explicit sharding cannot be cut.
    return is_large and explicit_sharding(x) is None

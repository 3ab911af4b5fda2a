"""Reductions that a CPU takes while it computes what is reduced.

XLA:CPU fuses a reduction of integers with its operand only up to a few terms, and one
of floats never: others read an array that was written to memory first. In two steps,
the first of few terms, no such array is needed; the second step reads what is left.
Results are the same as in one step, bit for bit.
"""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.partitions import partition_dependent
from aqtlite.sharding import explicit_sharding

# LLVM unrolls, and then vectorizes, a loop over so many terms; it gives up on 16 of
# them where a term takes long to compute.
_TERMS = 8
_WORTHWHILE = 2**14  # elements


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest_magnitude(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``max(|x|)`` over some axes of a float32 array, keepdims; 0 over an empty axis.

    A NaN makes its maximum NaN or, on CPUs, infinite.
    """

    as_floats = functools.partial(_largest_of_floats, axes=axes)

    # XLA:CPU's maximum of floats passes over a NaN. Without a sign, floats are in the
    # order of their bits, and NaN comes last.
    def bits_of(x):
        return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

    def as_bits(x):
        largest = jnp.max(bits_of(x), axis=axes, keepdims=True, initial=0)
        return lax.bitcast_convert_type(largest, jnp.float32)

    def in_two_steps(x):
        bits = _in_pieces(bits_of(x), axis, terms)
        first = jnp.minimum(bits.max(axis), infinity)
        return as_floats(lax.bitcast_convert_type(first, jnp.float32))

    infinity = np.float32(np.inf).view(np.int32)
    axis, terms = _cut(x, axes)

    def on_cpu(x):
        if not terms:
            return as_bits(x)
        return partition_dependent(x, one=in_two_steps, several=as_bits)

    return lax.platform_dependent(x, cpu=on_cpu, default=as_floats)


def _largest_of_floats(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)


@largest_magnitude.defjvp
def _largest_magnitude_jvp(axes, primals, tangents):
    """The derivative is that of the floats, which their bits do not have."""
    (x,) = primals
    as_floats = functools.partial(_largest_of_floats, axes=axes)
    _, tangent = jax.jvp(as_floats, primals, tangents)
    return largest_magnitude(x, axes), tangent


def _cut(x: jax.Array, axes: Iterable[int]) -> tuple[int, int]:
    """Which axis the first step cuts, and into how many terms; 0 is for one step."""
    is_known = all(isinstance(size, int) for size in x.shape)
    is_large = is_known and math.prod(x.shape) >= _WORTHWHILE
    # An axis with an explicit sharding cannot be cut.
    if not is_large or explicit_sharding(x) is not None:
        return 0, 0
    cuts = [
        (terms, x.shape[axis], axis)
        for axis in axes
        for terms in (_TERMS, _TERMS // 2)
        if x.shape[axis] % terms == 0
    ]
    terms, _, axis = max(cuts, default=(0, 0, 0))
    return axis, terms


def _in_pieces(x: jax.Array, axis: int, terms: int) -> jax.Array:
    """x with an axis cut into so many pieces, of which the terms are the elements."""
    pieces = (terms, x.shape[axis] // terms)
    return x.reshape(*x.shape[:axis], *pieces, *x.shape[axis + 1 :])

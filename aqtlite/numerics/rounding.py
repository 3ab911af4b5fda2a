"""Rounding to integers, which grids are made of."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact


def stochastically(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    """Rounds up with a probability equal to the distance from the integer below.

    From the nearest integer, a value moves on with a probability equal to the distance.
    That is exact in float32, and no product is added to anything: a compiler would
    contract the two into one rounding in one program and not in another. Compared with
    31 random bits, so that the probability is right within 2^-31, also for elements
    far below a step.

    >>> stochastically(jnp.array([0.25, 0.25, 3.0]), jnp.array([0, 2**31, 0], "uint32"))
    Array([1, 0, 3], dtype=int32)

    Args:
        x: float32, within 2^22.
        noise: uint32 random bits of the same shape.

    Returns:
        int32.

    Raises:
        ValueError: if there are no random bits.
    """
    nearest = exact.nearest_integer(x)
    rest = lax.sub(x, lax.convert_element_type(nearest, jnp.float32))
    distance = lax.mul(lax.abs(rest), np.float32(2.0**31))
    moves = lax.lt(uniform_31(noise), distance)
    # -1 or 1, as the sign bit says. That of a zero or a NaN says nothing: none moves.
    signs = lax.bitcast_convert_type(rest, jnp.int32)
    step = lax.bitwise_or(lax.shift_right_arithmetic(signs, np.int32(31)), np.int32(1))
    return lax.select(moves, lax.add(nearest, step), nearest)


def uniform_31(noise: jax.Array | None) -> jax.Array:
    """31 of 32 random bits as a float32 from 0 to 2^31.

    Raises:
        ValueError: if there are none.
    """
    if noise is None:
        raise ValueError("stochastic rounding needs random bits, got None")
    positive = lax.bitcast_convert_type(
        lax.shift_right_logical(noise, np.uint32(1)), jnp.int32
    )
    return lax.convert_element_type(positive, jnp.float32)


def around_zero_point(
    steps: jax.Array, zero_point: jax.Array, limits: tuple[int, int]
) -> jax.Array:
    """Moves rounded steps by the zero point, into the range of stored values.

    Added as integers: a sum with a product could be contracted into one rounding.

    Args:
        steps: int32, as `Numerics.round` returns them on a grid with a zero point.
        zero_point: int32.
        limits: the smallest and largest stored value.

    Returns:
        int32.
    """
    smallest, largest = limits
    steps = jnp.clip(steps, smallest - largest, largest - smallest)
    return jnp.clip(steps + zero_point, smallest, largest)

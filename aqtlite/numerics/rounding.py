"""Rounding to integers, the building block of grids."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact


def stochastically(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    """Rounds up with a probability equal to the distance from the integer below.

    Rounds to nearest, then moves on towards the value by one, with a probability equal
    to the distance. The distance is exact in float32, and no product is added to
    anything, which compilers contract to an FMA in some programs but not in others. The
    distance is compared with 31 random bits, so the probability is accurate to 2^-31,
    even for elements far below a step.

    >>> stochastically(jnp.array([0.25, 0.25, 3.0]), jnp.array([0, 2**31, 0], "uint32"))
    Array([1, 0, 3], dtype=int32)

    Args:
        x: float32, of magnitude up to 2^22.
        noise: random bits, uint32, of the shape of `x`.

    Returns:
        int32.

    Raises:
        ValueError: if `noise` is None.
    """
    nearest = exact.nearest_integer(x)
    rest = lax.sub(x, lax.convert_element_type(nearest, jnp.float32))
    distance = lax.mul(lax.abs(rest), np.float32(2.0**31))
    moves = lax.lt(uniform_31(noise), distance)
    # -1 or 1, by the sign bit, which is irrelevant for zero and NaN: these never move.
    signs = lax.bitcast_convert_type(rest, jnp.int32)
    step = lax.bitwise_or(lax.shift_right_arithmetic(signs, np.int32(31)), np.int32(1))
    return lax.select(moves, lax.add(nearest, step), nearest)


def uniform_31(noise: jax.Array | None) -> jax.Array:
    """Converts 31 of 32 random bits to a float32 from 0 to 2^31.

    Raises:
        ValueError: if `noise` is None.
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
    """Adds the zero point to rounded steps, and clips to the stored values.

    Added as integers: in float, a compiler could contract a product and the sum.

    Args:
        steps: result of `Numerics.round` on a grid with a zero point, int32.
        zero_point: zero point, int32.
        limits: smallest and largest stored value.

    Returns:
        int32.
    """
    smallest, largest = limits
    steps = jnp.clip(steps, smallest - largest, largest - smallest)
    return jnp.clip(steps + zero_point, smallest, largest)

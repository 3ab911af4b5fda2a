"""Rounding to integers, the building block of grids."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.lowering.elementwise import Elementwise


def stochastically(
    x: jax.Array, noise: jax.Array | None, dtype: jax.typing.DTypeLike = jnp.int32
) -> jax.Array:
    """Rounds up with a probability equal to the distance from the integer below.

    Rounds to nearest, and to the integer on the other side with a probability equal to
    the distance from the nearest. The distance is exact in float32, and no product is
    added to anything, which compilers contract to an FMA in some programs but not in
    others. The distance is compared with 31 random bits, so the probability is accurate
    to 2^-31, even for elements far below a step.

    >>> stochastically(jnp.array([0.25, 0.25, 3.0]), jnp.array([0, 2**31, 0], "uint32"))
    Array([1, 0, 3], dtype=int32)

    Args:
        x: float32, of magnitude up to 2^22 - 1.
        noise: random bits, uint32, of the shape of `x`.
        dtype: int32, int16, int8 or int4, which holds the result.

    Returns:
        integers of `dtype`.

    Raises:
        ValueError: if `noise` is None.
    """
    function = Elementwise(_stochastically, (np.dtype(dtype),))
    return function(x, given(noise))


def _stochastically(dtype: np.dtype, x: jax.Array, noise: jax.Array) -> jax.Array:
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = lax.sub(x, nearest)
    distance = lax.mul(lax.abs(rest), np.float32(2.0**31))
    moves = lax.lt(uniform_31(noise), distance)
    other = lax.add(nearest, lax.sign(rest))
    return exact.nearest_integer(lax.select(moves, other, nearest), dtype)


def given(noise: jax.Array | None) -> jax.Array:
    """Returns random bits; raises ValueError if they are None."""
    if noise is None:
        raise ValueError("stochastic rounding needs random bits, got None")
    return noise


def uniform_31(noise: jax.Array) -> jax.Array:
    """Converts 31 of 32 random bits to a float32 from 0 to 2^31."""
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

"""Pooling over windows of two spatial axes."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def average_pool_2d(
    x: jax.Array, window: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    """AVERAGE_POOL_2D of int8, without padding.

    The integers are averaged as they are, on one grid: their sum, divided by their
    number, a half rounded away from zero.

    Source: TFLite, ``reference/integer_ops/pooling.h``, under every resolver.

    Args:
        x: int8, shape (batch, height, width, channels).
        window: height and width of the window.
        strides: strides of the window.
    """
    count = np.int32(math.prod(window))
    window, strides = (1, *window, 1), (1, *strides, 1)
    wide, zero = x.astype(jnp.int32), np.int32(0)
    sums = lax.reduce_window(wide, zero, lax.add, window, strides, "VALID")
    # Integers are divided toward zero.
    averages = lax.div(sums + lax.sign(sums) * (count // 2), jnp.full_like(sums, count))
    return averages.astype(x.dtype)

"""Softmax and log-softmax over the last axis."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import fixed_point, interpolated, rescaling
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.lowering import exact


def softmax(x: Quantized, grid: Grid) -> jax.Array:
    """SOFTMAX over the last axis: in float32 for int8, by tables for int16.

    For int8, ``round(e[d] * (1 / (s * scale))) + zero_point`` with
    ``e[d] = exp(-x_scale * d)`` for the distance d from the maximum, and s the sum of
    the exponentials in order. Halves are rounded away from zero.

    Source: TFLite, ``Softmax`` in ``optimized/optimized_ops.h``; XNNPACK does not run
    it.

    Args:
        x: int8 or int16.
        grid: grid of the result; in LiteRT, scale 1 / 256 and zero point -128 for int8,
            and scale 2**-15 for int16.
    """
    if x.grid.dtype == "int16":
        return _softmax_of_int16(x)
    exponentials, total = _exponentials(x)
    inverse = np.float32(1) / (total * np.float32(grid.scale))
    scaled = exponentials * inverse[..., None]
    rounded = lax.round(scaled, lax.RoundingMethod.AWAY_FROM_ZERO)
    return rescaling.shifted(rounded.astype(jnp.int32), grid)


def _softmax_of_int16(x: Quantized) -> jax.Array:
    """SOFTMAX of int16 over the last axis, to int16 with scale 2**-15.

    Exponentials and the reciprocal of their sum are interpolated in tables; the sum is
    int32, with 15 fractional bits.

    Source: TFLite, ``SoftmaxInt16`` in ``reference/softmax.h``.
    """
    # LiteRT computes these tables in float64.
    span = 65535.0
    exponential = interpolated.table(
        np.exp, np.float64(10 / span), 32767, np.float64(2 / span)
    )
    reciprocal = interpolated.table(
        lambda v: 1 / (1 + v), np.float64(1 / span), -32768, np.float64(2 / span)
    )
    wide = x.qvalue.astype(jnp.int32)
    distances = wide - jnp.max(wide, -1, keepdims=True)
    # In units of 10 / 65535.
    scale = np.float64(np.float32(x.grid.scale)) / (10.0 / span)
    fixed = fixed_point.quantized_multiplier(scale)
    scaled = fixed_point.rounded_away(distances, *fixed)
    place = jnp.clip(scaled + 32767, -32768, 32767)
    values = interpolated.interpolate(exponential, place)
    total = jnp.sum(values, -1, jnp.int32, keepdims=True)
    zeros = lax.clz(total)
    # Normalized to [2**30, 2**31), then reduced to 16 fractional bits.
    shifted = ((total << (zeros - 1)) + (1 << 13)) >> 14
    centered = jnp.clip(shifted - (2**15 + 2**16), -32768, 32767)
    inverse = interpolated.interpolate(reciprocal, centered)
    right = 31 - zeros
    product = values * inverse + (1 << (right - 1))
    return jnp.clip(product >> right, 0, 32767).astype(jnp.int16)


def log_softmax(x: Quantized, grid: Grid) -> jax.Array:
    """LOG_SOFTMAX of int8 over the last axis, in float32.

    ``rint(x_scale / scale * x - (x_scale * largest + log(s)) / scale) + zero_point``,
    with s as in `softmax`, and ``largest`` the row's largest integer.

    Source: TFLite, ``LogSoftmax`` in ``optimized/optimized_ops.h``.

    Args:
        x: int8.
        grid: grid of the result; in LiteRT, scale 1 / 16 and zero point 127.
    """
    _, total = _exponentials(x)
    integers = x.qvalue.astype(jnp.float32)
    x_scale, scale = np.float32(x.grid.scale), np.float32(grid.scale)
    largest = jnp.max(integers, -1, keepdims=True)
    reached = exact.rounded_product(largest, jnp.asarray(x_scale))
    offset = (reached + jnp.log(total)[..., None]) / scale
    products = exact.rounded_product(integers, jnp.asarray(x_scale / scale))
    rounded = lax.round(products - offset, lax.RoundingMethod.TO_NEAREST_EVEN)
    return rescaling.shifted(rounded.astype(jnp.int32), grid)


def _exponentials(x: Quantized) -> tuple[jax.Array, jax.Array]:
    """Exponentials of the negative distances from the maximum, and their sums."""
    # The product is rounded to float32, and so is its exponential.
    distances = np.arange(256, dtype=np.float32) * -np.float32(x.grid.scale)
    table = np.exp(distances.astype(np.float64)).astype(np.float32)
    wide = x.qvalue.astype(jnp.int32)
    exponentials = jnp.asarray(table)[jnp.max(wide, -1, keepdims=True) - wide]

    def add(total, values):
        return total + values, None

    # Sequential, because the order of additions determines the last bit.
    in_order = jnp.moveaxis(exponentials, -1, 0)
    total, _ = lax.scan(add, in_order[0], in_order[1:])
    return exponentials, total

"""Exact rounding of scales to the values of a dtype, the same in every program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact, float8
from aqtlite.numerics import Float
from aqtlite.shapes.dimension_numbers import Axes

DTYPES = ("bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2")
"""Dtypes, other than float32, that scales can be rounded to."""

RELATIVE_DTYPES = ("float16", "float8_e4m3fn", "float8_e5m2")
"""Those whose values are multiplied by a float32 number that several scales share."""

_MANTISSA = (1 << 23) - 1


def round_scale(
    scale: jax.Array,
    bound: jax.Array,
    grid_bound: float,
    unit: float,
    empty: float,
    dtype: np.dtype,
    shared: Axes | None = None,
    *,
    may_clip: bool = True,
) -> jax.Array:
    """Rounds scales to the values of a dtype; see `config.Tensor.scale_dtype`.

    Args:
        scale: unrounded scale, float32: ``bound * unit / grid_bound``, `empty` where
            that is zero or subnormal, NaN where the bound is not finite.
        bound: bound from the calibration, float32.
        grid_bound: bound of the grid.
        unit: scaled value of one stored unit, a power of two.
        empty: scale of an all-zero channel; with `RELATIVE_DTYPES` the largest scale
            that shares its number, if there is one.
        dtype: one of `DTYPES`.
        shared: axes along which scales share the number that multiplies values of
            `RELATIVE_DTYPES`; None for all axes.
        may_clip: False rounds up, so that the grid covers every value, as unbiased
            stochastic rounding requires.

    Returns:
        float32, of the shape of `scale`.
    """
    nothing = jnp.float32(empty)
    if dtype == jnp.bfloat16:
        rounded = _ceil_to_bfloat16(scale)
    elif dtype == jnp.float8_e8m0fnu:
        if not may_clip:
            return ceil_to_power_of_two(scale)
        rounded = _microscaling(bound, grid_bound, unit)
    else:
        grid = Float.from_dtype(dtype)
        rounded, largest = _relative(scale, bound, grid, shared, may_clip=may_clip)
        if empty:
            # `factored` finds the number in all scales.
            nothing = jnp.where(largest > 0, largest, nothing)
    is_empty = exact.algebraic_barrier(bound) == 0
    # Including subnormal results, which CPUs flush to zero.
    is_empty |= rounded < jnp.finfo(jnp.float32).tiny
    rounded = jnp.where(is_empty, nothing, rounded)
    return jnp.where(jnp.isfinite(scale), rounded, jnp.float32(jnp.nan))


def ceil_to_power_of_two(scale: jax.Array) -> jax.Array:
    """The smallest power of two at or above each positive float32 value, exactly.

    Values above 2^127, the largest power of two, become 2^127.
    """
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    rounded = jnp.minimum((bits + _MANTISSA) & ~_MANTISSA, (127 + 127) << 23)
    power = lax.bitcast_convert_type(rounded, jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)


def nearest_power_of_two(x: jax.Array) -> jax.Array:
    """The power of two nearest in the logarithm to each positive, normal float32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    root = int(np.float32(2.0**0.5).view(np.int32)) & _MANTISSA
    rounded = (bits + (_MANTISSA - root)) & ~_MANTISSA
    return lax.bitcast_convert_type(rounded, jnp.float32)


def _ceil_to_bfloat16(scale: jax.Array) -> jax.Array:
    """The smallest bfloat16 at or above each positive float32, at most the largest."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0xFFFF) & ~0xFFFF, jnp.float32)
    return jnp.minimum(up, np.float32(jnp.finfo(jnp.bfloat16).max))


def _microscaling(bound: jax.Array, grid_bound: float, unit: float) -> jax.Array:
    """``2^(floor(log2(bound)) - floor(log2(grid_bound)))`` times the unit."""
    bits = lax.bitcast_convert_type(bound, jnp.int32)
    power = lax.bitcast_convert_type(bits & ~_MANTISSA, jnp.float32)
    return power * np.float32(math.ldexp(unit, 1 - math.frexp(grid_bound)[1]))


def factored(
    scale: jax.Array, dtype: np.dtype, shared: Axes | None
) -> tuple[jax.Array, jax.Array]:
    """Splits scales that share a number into values of a dtype and the number.

    The largest value has one of 4 or 8 significands. The number is that of the
    significand with which all scales are values of the dtype, so that it is also found
    for a part of an array, whose largest value need not be that of the dtype.

    Args:
        scale: positive values of the dtype times a number, float32, rounded. NaN stays
            NaN.
        dtype: float8_e4m3fn or float8_e5m2.
        shared: axes along which they share the number; None for all axes.

    Returns:
        The values, of the dtype and the shape of `scale`, and the numbers, float32 and
        keepdims. Their product is the scale, to float32's precision.
    """
    info = jnp.finfo(dtype)
    known = jnp.where(jnp.isfinite(scale), scale, np.float32(0))
    largest = jnp.max(known, shared, keepdims=True, initial=0.0)
    number = _part(largest, float(info.max))
    least = jnp.full_like(number, np.inf)
    for significand in range(2**info.nmant, 2 ** (info.nmant + 1)):
        top = float(significand)
        while 2 * top <= float(info.max):
            top *= 2
        candidate = _part(largest, top)
        values = (known / candidate).astype(dtype).astype(jnp.float32)
        errors = jnp.abs(values * candidate - known)
        # Relative errors: a wrong significand misses some scale by a 32nd or more.
        errors = jnp.where(known > 0, errors / known, np.float32(0))
        error = jnp.max(errors, shared, keepdims=True, initial=0.0)
        number = jnp.where(error < least, candidate, number)
        least = jnp.minimum(error, least)
    return (scale / number).astype(dtype), number


def _part(largest: jax.Array, top: float) -> jax.Array:
    """The number by which a value `top` is the largest scale."""
    number = exact.algebraic_barrier(largest) * np.float32(1 / top)
    return jnp.maximum(number, jnp.finfo(jnp.float32).tiny)


def _relative(
    scale: jax.Array,
    bound: jax.Array,
    grid: Float,
    shared: Axes | None,
    *,
    may_clip: bool,
) -> tuple[jax.Array, jax.Array]:
    """Rounds scales to a grid's values times one number for those along `shared`.

    The number maps the largest scale onto the grid's largest value. Rounds to nearest,
    or up unless `may_clip`.

    Returns:
        The scales, and the largest of them, keepdims.
    """
    is_used = jnp.isfinite(scale) & (bound > 0)
    used = jnp.where(is_used, scale, np.float32(0))
    largest = jnp.max(used, shared, keepdims=True, initial=0.0)
    whole = _part(largest, grid.bound)
    codes = grid.round(exact.algebraic_barrier(used) * (np.float32(1) / whole), None)
    values = jnp.maximum(float8.widened(codes), np.float32(grid.smallest))
    rounded = exact.rounded_product(values, whole)
    top = exact.rounded_product(jnp.full_like(whole, grid.bound), whole)
    top = jnp.where(largest > 0, top, np.float32(0))
    if may_clip:
        return rounded, top
    # Positive floats are ordered like their bits.
    bits = jnp.dtype(f"uint{8 * codes.dtype.itemsize}")
    after = lax.bitcast_convert_type(codes, bits) + np.ones((), bits)
    after = float8.widened(lax.bitcast_convert_type(after, codes.dtype))
    after = jnp.minimum(after, np.float32(grid.bound))
    above = exact.rounded_product(after, whole)
    return jnp.where(rounded < used, above, rounded), top

"""How a contraction of stored integers is handed to XLA on each platform.

Nothing here knows of configs: integers, dimension numbers and an accumulator go in,
sums of products come out, the same on every path.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import dimension_numbers as dn


def integer_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    out_sharding: object | None = None,
) -> jax.Array:
    """Contracts stored integers.

    Args:
        lhs: int4, int8 or int16.
        rhs: int4, int8 or int16.
        dims: canonical dimension numbers.
        out_sharding: as `lax.dot_general` takes it.

    Returns:
        The exact sums in int32 where int32 is certain to hold them, otherwise in
        float32, summed over pieces that int32 does hold.
    """
    if jnp.int16 in (lhs.dtype, rhs.dtype):
        # Doubled 8-bit halves. No platform multiplies int16 matrices fast; products
        # of 9-bit odd numbers are exact in float32, and so are sums of a few hundred.
        return _dot(
            lhs.astype(jnp.float32),
            rhs.astype(jnp.float32),
            dims,
            jnp.float32,
            out_sharding,
            precision=lax.Precision.HIGHEST,
        )
    piece = _largest_safe_contraction(lhs.dtype, rhs.dtype)
    if dn.contraction_size(dims, lhs.shape) > piece:
        return _dot_in_pieces(lhs, rhs, dims, out_sharding, piece)
    return _narrow_dot(lhs, rhs, dims, out_sharding)


def _narrow_dot(lhs, rhs, dims, out_sharding):
    if jnp.int4 not in (lhs.dtype, rhs.dtype):
        return _dot(lhs, rhs, dims, jnp.int32, out_sharding)

    def widened(lhs, rhs):
        return _dot(
            lhs.astype(jnp.int8), rhs.astype(jnp.int8), dims, jnp.int32, out_sharding
        )

    def narrow(lhs, rhs):
        if lhs.dtype != rhs.dtype:
            return widened(lhs, rhs)
        return _dot(lhs, rhs, dims, jnp.int32, out_sharding)

    # XLA's CPU and GPU backends have no int4 x int4 contraction.
    return lax.platform_dependent(lhs, rhs, tpu=narrow, default=widened)


def _largest_safe_contraction(lhs_dtype: np.dtype, rhs_dtype: np.dtype) -> int:
    """How many products int32 is certain to hold."""
    largest = -int(jnp.iinfo(lhs_dtype).min) * -int(jnp.iinfo(rhs_dtype).min)
    return (2**31 - 1) // largest


def _dot_in_pieces(lhs, rhs, dims, out_sharding, piece):
    """Splits the longest contracting axis so that every piece fits int32."""
    (lhs_ca, rhs_ca), _ = dims
    which = int(np.argmax([lhs.shape[axis] for axis in lhs_ca]))
    lhs_axis, rhs_axis = lhs_ca[which], rhs_ca[which]
    size = lhs.shape[lhs_axis]
    others = dn.contraction_size(dims, lhs.shape) // size
    step = max(1, piece // others)
    total = None
    for start in range(0, size, step):
        stop = min(start + step, size)
        part = integer_dot(
            lax.slice_in_dim(lhs, start, stop, axis=lhs_axis),
            lax.slice_in_dim(rhs, start, stop, axis=rhs_axis),
            dims,
            out_sharding,
        ).astype(jnp.float32)
        total = part if total is None else total + part
    return total


def _dot(lhs, rhs, dims, accumulator, out_sharding, precision=None):
    sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=precision,
        preferred_element_type=accumulator,
        **sharding,
    )


def float_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    accumulator: np.dtype,
    out_sharding: object | None = None,
) -> jax.Array:
    """Contracts operands of which at least one is floating; integers are widened.

    Integers of a grid are exact in every float dtype that has 8 bits of mantissa, so
    they are cast to the other operand's dtype.
    """
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        lhs = lhs.astype(rhs.dtype)
    if not jnp.issubdtype(rhs.dtype, jnp.floating):
        rhs = rhs.astype(lhs.dtype)
    return _dot(lhs, rhs, dims, accumulator, out_sharding)

"""How a contraction of stored integers is handed to XLA on each platform.

Nothing here knows of configs: integers, dimension numbers and an accumulator go in,
sums of products come out, the same on every path.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import dimension_numbers as dn
from aqtlite.lowering import cpu, gpu, plain


def integer_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Contracts stored integers.

    Args:
        lhs: int4, int8 or int16.
        rhs: int4, int8 or int16.
        dims: canonical dimension numbers.
        order: a permutation of the axes of `lax.dot_general`'s result.
        out_sharding: of the permuted result.

    Returns:
        The exact sums in int32 where int32 is certain to hold them, otherwise in
        float32, summed over pieces that int32 does hold.
    """
    if order is not None:
        return _dot_in_order(lhs, rhs, dims, order, out_sharding)
    if jnp.int16 in (lhs.dtype, rhs.dtype):
        # Doubled 8-bit halves. No platform multiplies int16 matrices fast; products
        # of 9-bit odd numbers are exact in float32, and so are sums of a few hundred.
        return plain.dot(
            lhs.astype(jnp.float32),
            rhs.astype(jnp.float32),
            dims,
            jnp.float32,
            out_sharding,
            precision=lax.Precision.HIGHEST,
        )
    piece = _largest_safe_contraction(lhs.dtype, rhs.dtype)
    products = dn.contraction_size(dims, lhs.shape)
    # A symbolic size (jax.export) is taken to fit: it cannot be split.
    if isinstance(products, int) and products > piece:
        return _dot_in_pieces(lhs, rhs, dims, out_sharding, piece)
    return _narrow_dot(lhs, rhs, dims, out_sharding)


def _dot_in_order(lhs, rhs, dims, order, out_sharding):
    """Exchanges the operands where that spares a transposition of the sums."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    lhs_rank = lhs.ndim - len(lhs_ca)
    rhs_rank = rhs.ndim - len(rhs_ca) - len(batch)
    if rhs_rank and len(batch) <= order[-1] < lhs_rank:
        lhs, rhs, dims = rhs, lhs, dn.transpose(dims)
        axes = range(lhs_rank + rhs_rank)
        exchanged = [
            *axes[: len(batch)],
            *axes[lhs_rank:],
            *axes[len(batch) : lhs_rank],
        ]
        order = tuple(exchanged.index(axis) for axis in order)
    out_sharding = _before_permutation(out_sharding, order)
    return integer_dot(lhs, rhs, dims, out_sharding=out_sharding).transpose(order)


def _before_permutation(sharding, order):
    if sharding is None:
        return None
    spec = tuple(sharding.spec) + (None,) * (len(order) - len(sharding.spec))
    return sharding.update(spec=[spec[int(axis)] for axis in np.argsort(order)])


def _narrow_dot(lhs, rhs, dims, out_sharding):
    """Contracts int4 and int8, in a form that each platform has, and runs fast."""
    if out_sharding is not None:
        # Padding and reshaping would need shardings of their own.
        is_fast_on_cpu = is_fast_on_gpu = True
    else:
        is_fast_on_cpu = cpu.is_fast(lhs.shape, rhs.shape, dims)
        is_fast_on_gpu = gpu.is_aligned(lhs.shape, rhs.shape, dims)

    def as_stored(lhs, rhs):
        return plain.dot(lhs, rhs, dims, jnp.int32, out_sharding)

    def widened(lhs, rhs):
        return as_stored(lhs.astype(jnp.int8), rhs.astype(jnp.int8))

    def on_cpu(lhs, rhs):
        return cpu.dot(lhs.astype(jnp.int8), rhs.astype(jnp.int8), dims)

    def on_gpu(lhs, rhs):
        return gpu.dot(lhs.astype(jnp.int8), rhs.astype(jnp.int8), dims)

    has_int4 = jnp.int4 in (lhs.dtype, rhs.dtype)
    if is_fast_on_cpu and is_fast_on_gpu and not has_int4:
        return as_stored(lhs, rhs)
    # XLA's CPU and GPU backends have no int4 x int4 contraction.
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=widened if is_fast_on_cpu else on_cpu,
        tpu=as_stored if lhs.dtype == rhs.dtype else widened,
        default=widened if is_fast_on_gpu else on_gpu,
    )


def _largest_safe_contraction(lhs_dtype: np.dtype, rhs_dtype: np.dtype) -> int:
    """How many products int32 is certain to hold: 133144 of int8 by int8.

    Grids are symmetric: they do not reach the dtype's minimum.
    """
    largest = int(jnp.iinfo(lhs_dtype).max) * int(jnp.iinfo(rhs_dtype).max)
    return (2**31 - 1) // largest


def _dot_in_pieces(lhs, rhs, dims, out_sharding, piece):
    """Splits the longest contracting axis so that every piece fits int32."""
    (lhs_ca, rhs_ca), _ = dims
    which = int(np.argmax([lhs.shape[axis] for axis in lhs_ca]))
    lhs_axis, rhs_axis = lhs_ca[which], rhs_ca[which]
    size = lhs.shape[lhs_axis]
    others = dn.contraction_size(dims, lhs.shape) // size
    count = -(-size // max(1, piece // others))
    step = -(-size // count)
    total = None
    for start in range(0, size, step):
        stop = min(start + step, size)
        part = integer_dot(
            lax.slice_in_dim(lhs, start, stop, axis=lhs_axis),
            lax.slice_in_dim(rhs, start, stop, axis=rhs_axis),
            dims,
            out_sharding=out_sharding,
        ).astype(jnp.float32)
        total = part if total is None else total + part
    return total


def float_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    accumulator: np.dtype,
    order: dn.Axes | None = None,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Contracts operands of which at least one is floating; integers are widened.

    Integers of a grid are exact in every float dtype that has 8 bits of mantissa, so
    they are cast to the other operand's dtype.
    """
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        lhs = lhs.astype(rhs.dtype)
    if not jnp.issubdtype(rhs.dtype, jnp.floating):
        rhs = rhs.astype(lhs.dtype)
    if order is None:
        return plain.dot(lhs, rhs, dims, accumulator, out_sharding)
    out_sharding = _before_permutation(out_sharding, order)
    return plain.dot(lhs, rhs, dims, accumulator, out_sharding).transpose(order)

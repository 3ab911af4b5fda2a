"""How a contraction of stored integers is handed to XLA on each platform.

Nothing here knows of configs: integers, dimension numbers and an accumulator go in,
sums of products come out, the same on every path.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite import dimension_numbers as dn
from aqtlite.lowering import cpu, digits, gpu, partitions, plain
from aqtlite.sharding import before_transposition


def integer_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    largest: tuple[int | None, int | None] = (None, None),
) -> jax.Array:
    """Contracts stored integers.

    Args:
        lhs: int4, int8 or int16.
        rhs: int4, int8 or int16.
        dims: canonical dimension numbers.
        order: a permutation of the axes of `lax.dot_general`'s result.
        out_sharding: of the permuted result.
        largest: the largest magnitudes in lhs and rhs; None for that of the dtype,
            without its minimum.

    Returns:
        The exact sums in int32 where int32 is certain to hold them, otherwise in
        float32, summed over pieces that int32 does hold.
    """
    lhs_largest, rhs_largest = (
        int(jnp.iinfo(x.dtype).max) if one is None else one
        for x, one in ((lhs, largest[0]), (rhs, largest[1]))
    )
    largest = lhs_largest, rhs_largest
    if order is not None:
        return _dot_in_order(lhs, rhs, dims, order, out_sharding, largest)
    piece = (2**31 - 1) // (lhs_largest * rhs_largest)
    products = dn.contraction_size(dims, lhs.shape)
    # A symbolic size (jax.export) is taken to fit: it cannot be split.
    if isinstance(products, int) and products > piece:
        return _dot_in_pieces(lhs, rhs, dims, out_sharding, piece, largest)
    if jnp.int16 in (lhs.dtype, rhs.dtype):
        return _wide_dot(lhs, rhs, dims, out_sharding)
    return _narrow_dot(lhs, rhs, dims, out_sharding)


def _wide_dot(lhs, rhs, dims, out_sharding):
    """Contracts int16, which no platform does fast, in two int8 digits."""
    lhs, rhs = (
        digits.of_integers(x, 2) if x.dtype == jnp.int16 else jnp.expand_dims(x, 0)
        for x in (lhs, rhs)
    )
    batch = len(dims[1][0])
    rhs_axis = lhs.ndim - len(dims[0][0])
    if out_sharding is not None:
        out_sharding = _with_new_axes(out_sharding, batch, rhs_axis)
    sums = _narrow_dot(lhs, rhs, digits.stacked_dims(dims, lhs=1, rhs=1), out_sharding)
    return digits.combine(digits.combine(sums, rhs_axis), batch)


def _with_new_axes(sharding, *axes):
    spec = list(sharding.spec)
    for axis in axes:
        spec += [None] * (axis - len(spec))
        spec.insert(axis, None)
    return sharding.update(spec=spec)


def _dot_in_order(lhs, rhs, dims, order, out_sharding, largest):
    """Exchanges the operands where that spares a transposition of the sums."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    lhs_rank = lhs.ndim - len(lhs_ca)
    rhs_rank = rhs.ndim - len(rhs_ca) - len(batch)
    if rhs_rank and len(batch) <= order[-1] < lhs_rank:
        lhs, rhs, dims, largest = rhs, lhs, dn.transpose(dims), largest[::-1]
        axes = range(lhs_rank + rhs_rank)
        exchanged = [
            *axes[: len(batch)],
            *axes[lhs_rank:],
            *axes[len(batch) : lhs_rank],
        ]
        order = tuple(exchanged.index(axis) for axis in order)
    out_sharding = before_transposition(out_sharding, order)
    out = integer_dot(lhs, rhs, dims, out_sharding=out_sharding, largest=largest)
    return out.transpose(order)


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
        return partitions.partition_dependent(lhs, rhs, one=fast_cpu, several=widened)

    def on_gpu(lhs, rhs):
        return partitions.partition_dependent(lhs, rhs, one=padded, several=widened)

    def fast_cpu(lhs, rhs):
        return cpu.dot(lhs.astype(jnp.int8), rhs.astype(jnp.int8), dims)

    def padded(lhs, rhs):
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


def _dot_in_pieces(lhs, rhs, dims, out_sharding, piece, largest):
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
            largest=largest,
        ).astype(jnp.float32)
        total = part if total is None else total + part
    return total


def integer_dot_in_float(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    in_dtype: np.dtype,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    largest: tuple[int | None, int | None] = (None, None),
) -> jax.Array:
    """Contracts stored integers as values of a float dtype, to float32.

    A CPU contracts the integers: their sums are those that the float contraction
    approaches, the same in every program, and sooner there.
    """

    def as_integers(lhs, rhs):
        sums = integer_dot(lhs, rhs, dims, order, out_sharding, largest)
        return sums.astype(jnp.float32)

    def as_floats(lhs, rhs):
        lhs, rhs = lhs.astype(in_dtype), rhs.astype(in_dtype)
        return float_dot(lhs, rhs, dims, order, out_sharding).astype(jnp.float32)

    return lax.platform_dependent(lhs, rhs, cpu=as_integers, default=as_floats)


def mixed_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    *,
    out_dtype: np.dtype,
) -> jax.Array:
    """Contracts floats with stored integers, to float32.

    On CPUs the floats are taken apart into three int8 digits, or two where both they
    and the result are of 16 bits (`digits.of_floats`): three int8 contractions take
    less time than a float one that widens integers, and their sums are the same in
    every program, which a float contraction's are not. Elsewhere the integers are
    widened, which compilers fuse with the contraction.

    Args:
        lhs: floating, or stored integers.
        rhs: the other.
        dims: canonical dimension numbers.
        order: a permutation of the axes of `lax.dot_general`'s result.
        out_sharding: of the permuted result.
        out_dtype: in which the result is wanted in the end.
    """

    def in_digits(lhs, rhs):
        return _dot_of_digits(lhs, rhs, dims, order, out_sharding, out_dtype)

    def widened(lhs, rhs):
        dtype = lhs.dtype if jnp.issubdtype(lhs.dtype, jnp.floating) else rhs.dtype
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        return float_dot(lhs, rhs, dims, order, out_sharding).astype(jnp.float32)

    return lax.platform_dependent(lhs, rhs, cpu=in_digits, default=widened)


def _dot_of_digits(lhs, rhs, dims, order, out_sharding, out_dtype):
    batch, lhs_rank = len(dims[1][0]), lhs.ndim - len(dims[0][0])
    is_lhs = jnp.issubdtype(lhs.dtype, jnp.floating)
    floats = lhs if is_lhs else rhs
    is_half = jnp.finfo(floats.dtype).bits == jnp.finfo(out_dtype).bits == 16
    axes = dims[0][0 if is_lhs else 1]
    stack, unit = digits.of_floats(floats, axes, 2 if is_half else 3)
    if order is not None and out_sharding is not None:
        out_sharding = before_transposition(out_sharding, order)
    axis = batch if is_lhs else lhs_rank
    if out_sharding is not None:
        out_sharding = _with_new_axes(out_sharding, axis)
    if is_lhs:
        lhs, stacked = stack, digits.stacked_dims(dims, lhs=1)
        unit = dn.lhs_scale_to_output(unit, dims, rhs.ndim)
    else:
        rhs, stacked = stack, digits.stacked_dims(dims, rhs=1)
        unit = dn.rhs_scale_to_output(unit, dims, lhs.ndim)
    largest = (digits.LARGEST, None) if is_lhs else (None, digits.LARGEST)
    sums = integer_dot(lhs, rhs, stacked, None, out_sharding, largest)
    out = digits.combine(sums.astype(jnp.float32), axis) * unit
    return out if order is None else out.transpose(order)


def float_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Contracts floats, summed in float32 or in what is wider."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    if order is not None:
        out_sharding = before_transposition(out_sharding, order)

    def dot(lhs, rhs):
        return plain.dot(lhs, rhs, dims, accumulator, out_sharding)

    def widened(lhs, rhs):
        return dot(lhs.astype(accumulator), rhs.astype(accumulator))

    if cpu.sums_halves(lhs, rhs, dims):
        out = dot(lhs, rhs)
    else:
        out = lax.platform_dependent(lhs, rhs, cpu=widened, default=dot)
    return out if order is None else out.transpose(order)

"""How a contraction of stored integers is handed to XLA on each platform.

Nothing here knows of configs: integers, dimension numbers and an accumulator go in,
sums of products come out, the same on every path.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import dimension_numbers as dn
from aqtlite.sharding import explicit_sharding


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
        return _dot(
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
    if out_sharding is not None:
        out_sharding = _before_permutation(out_sharding, order)
    return integer_dot(lhs, rhs, dims, out_sharding=out_sharding).transpose(order)


def _before_permutation(sharding, order):
    spec = tuple(sharding.spec) + (None,) * (len(order) - len(sharding.spec))
    return sharding.update(spec=[spec[int(axis)] for axis in np.argsort(order)])


def _narrow_dot(lhs, rhs, dims, out_sharding):
    """Contracts int4 and int8, in a form that each platform has, and runs fast."""

    def as_stored(lhs, rhs):
        return _dot(lhs, rhs, dims, jnp.int32, out_sharding)

    def widened(lhs, rhs):
        return as_stored(lhs.astype(jnp.int8), rhs.astype(jnp.int8))

    def on_cpu(lhs, rhs):
        return _dot_on_cpu(lhs.astype(jnp.int8), rhs.astype(jnp.int8), dims)

    has_int4 = jnp.int4 in (lhs.dtype, rhs.dtype)
    is_fast_on_cpu = out_sharding is not None or not (
        _is_transposed(lhs.ndim, dims)
        or _has_one_row(lhs.shape, dims)
        or _has_one_row(rhs.shape, dn.transpose(dims))
    )
    if is_fast_on_cpu and not has_int4:
        return as_stored(lhs, rhs)
    # XLA's CPU and GPU backends have no int4 x int4 contraction.
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=widened if is_fast_on_cpu else on_cpu,
        tpu=as_stored if lhs.dtype == rhs.dtype else widened,
        default=widened if has_int4 else as_stored,
    )


def _is_transposed(lhs_ndim: int, dims: dn.DimensionNumbers) -> bool:
    """Whether lhs has a remaining axis after a contracting one."""
    (lhs_ca, _), (lhs_ba, _) = dims
    remaining = dn.remaining_axes(lhs_ndim, lhs_ca, lhs_ba)
    return bool(remaining and lhs_ca) and max(remaining) > min(lhs_ca)


def _has_one_row(lhs_shape: tuple[int, ...], dims: dn.DimensionNumbers) -> bool:
    """Whether lhs is a single row of its matrix."""
    (lhs_ca, _), (lhs_ba, _) = dims
    remaining = dn.remaining_axes(len(lhs_shape), lhs_ca, lhs_ba)
    return math.prod(lhs_shape[axis] for axis in remaining) == 1


def _dot_on_cpu(lhs, rhs, dims):
    """Keeps a contraction on XLA:CPU's fast path, off which it runs a plain loop.

    - A matrix-vector product falls off it: one row, of either side, is made two.
    - A transposed lhs falls off it, whatever is done about the transposition, but not
      with a second contracting axis, which may have size one.
    """
    if _contracts_leading_axes(lhs, dims):
        return _dot_over_blocks(lhs, rhs, contracted=len(dims[0][0]))
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    one_lhs_row = _has_one_row(lhs.shape, dims)
    one_rhs_row = _has_one_row(rhs.shape, dn.transpose(dims))
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    if one_lhs_row:
        lhs, lhs_ca, lhs_ba = _with_two_rows(lhs, lhs_ca, lhs_ba)
    if one_rhs_row:
        rhs, rhs_ca, rhs_ba = _with_two_rows(rhs, rhs_ca, rhs_ba)
    dims = (lhs_ca, rhs_ca), (lhs_ba, rhs_ba)
    if len(lhs_ca) == 1 and _is_transposed(lhs.ndim, dims):
        lhs, lhs_ca, lhs_ba = _with_unit_axis(lhs, lhs_ca, lhs_ba)
        rhs, rhs_ca, rhs_ba = _with_unit_axis(rhs, rhs_ca, rhs_ba)
        dims = (lhs_ca, rhs_ca), (lhs_ba, rhs_ba)
    out = _dot(lhs, rhs, dims, jnp.int32, None)
    if one_lhs_row:
        out = lax.index_in_dim(out, 0, axis=len(lhs_ba), keepdims=False)
    if one_rhs_row:
        out = lax.index_in_dim(out, 0, axis=-1, keepdims=False)
    return out.reshape(shape)


def _contracts_leading_axes(lhs, dims):
    """Whether both operands are transposed and can be reshaped to a matrix each."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    is_leading = lhs_ca == rhs_ca == tuple(range(len(lhs_ca)))
    is_known = all(isinstance(size, int) for size in lhs.shape)
    can_reshape = is_known and explicit_sharding(lhs) is None
    return is_leading and not batch and can_reshape


def _dot_over_blocks(lhs, rhs, contracted):
    """Contracts the leading axes, of which lhs's lie the wrong way round.

    XLA:CPU copies lhs with its axes exchanged. Left alone, it fuses what computed lhs
    into that copy and runs it a second time, in strides that miss the cache at every
    element. It fuses nothing into a loop, and 16 rows at a time stay in the cache.
    """
    products = math.prod(lhs.shape[:contracted])

    def blocks(x):
        matrix = x.reshape(products, math.prod(x.shape[contracted:]))
        matrix = jnp.pad(matrix, ((0, -products % 16), (0, 0)))
        return matrix.reshape(matrix.shape[0] // 16, 16, matrix.shape[1])

    columns = lax.map(jnp.transpose, blocks(lhs))
    dims = ((0, 2), (0, 1)), ((), ())
    out = _dot(columns, blocks(rhs), dims, jnp.int32, None)
    return out.reshape(lhs.shape[contracted:] + rhs.shape[contracted:])


def _with_two_rows(x, contracting, batch):
    """Gives an operand with one row a second one, of zeros, before its sums."""
    named = [axis for axis in range(x.ndim) if axis in contracting + batch]
    x = x.reshape([x.shape[axis] for axis in named])
    contracting = tuple(named.index(axis) for axis in contracting)
    batch = tuple(named.index(axis) for axis in batch)
    row = min(contracting, default=x.ndim)
    x = jnp.expand_dims(x, row)
    padding = [(0, int(axis == row), 0) for axis in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), padding)
    return x, _after_insertion(contracting, row), _after_insertion(batch, row)


def _with_unit_axis(x, contracting, batch):
    """Gives the operand's one contracting axis a neighbour of size one."""
    (axis,) = contracting
    return jnp.expand_dims(x, axis), (axis, axis + 1), _after_insertion(batch, axis)


def _after_insertion(axes, at):
    return tuple(axis + (axis >= at) for axis in axes)


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
        return _dot(lhs, rhs, dims, accumulator, out_sharding)
    if out_sharding is not None:
        out_sharding = _before_permutation(out_sharding, order)
    return _dot(lhs, rhs, dims, accumulator, out_sharding).transpose(order)

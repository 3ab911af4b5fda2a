"""Contractions of floats with stored integers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import cpu, digits
from aqtlite.lowering.floating import float_dot
from aqtlite.lowering.integer import integer_dot, with_new_axes
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import before_transposition

# Up to so many sums of digits are kept at once; beyond, they would leave the cache.
_FEW_SUMS = 2**21

# The sums of a block of rows, which has at least so many rows, so that rhs is not read
# more often than need be.
_BLOCK_SUMS = 2**19
_BLOCK_ROWS = 128


def mixed_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
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
        precision: of a contraction of floats; sums of digits have that of float32.
        out_dtype: in which the result is wanted in the end.
    """
    dot = _MixedDot(dims, order, out_sharding, precision, np.dtype(out_dtype))
    return dot(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _MixedDot(TargetDependent):
    """A contraction of floats with integers."""

    dims: dn.DimensionNumbers
    order: dn.Axes | None
    out_sharding: NamedSharding | None
    precision: lax.PrecisionLike
    out_dtype: np.dtype

    def reference(self, lhs, rhs):
        dtype = lhs.dtype if jnp.issubdtype(lhs.dtype, jnp.floating) else rhs.dtype
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        out = float_dot(
            lhs, rhs, self.dims, self.order, self.out_sharding, self.precision
        )
        return out.astype(jnp.float32)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        dims, order, out_dtype = self.dims, self.order, self.out_dtype
        if target.partitions > 1 or self.out_sharding is not None:
            sharding = self.out_sharding
            return _dot_of_digits(lhs, rhs, dims, order, sharding, out_dtype)
        if _has_large_sums(lhs, rhs, dims):
            return _dot_in_blocks(lhs, rhs, dims, order, out_dtype)
        return _dot_of_digits(lhs, rhs, dims, order, None, out_dtype)


def _dot_of_digits(lhs, rhs, dims, order, out_sharding, out_dtype):
    """Contracts the digits of either operand, stacked as a remaining axis."""
    batch, lhs_rank = len(dims[1][0]), lhs.ndim - len(dims[0][0])
    is_lhs = jnp.issubdtype(lhs.dtype, jnp.floating)
    floats = lhs if is_lhs else rhs
    count = digits.count_for(floats, out_dtype)
    stack, unit = digits.of_floats(floats, dims[0][0 if is_lhs else 1], count)
    if order is not None and out_sharding is not None:
        out_sharding = before_transposition(out_sharding, order)
    axis = batch if is_lhs else lhs_rank
    if out_sharding is not None:
        out_sharding = with_new_axes(out_sharding, axis)
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


def _has_large_sums(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> bool:
    """Returns True if `_dot_in_blocks` contracts such operands, and sooner."""
    (lhs_ca, _), (batch, _) = dims
    rank = lhs.ndim - len(lhs_ca)
    is_last = lhs_ca == tuple(range(rank, lhs.ndim)) and not batch
    is_float = jnp.issubdtype(lhs.dtype, jnp.floating)
    if not (is_last and is_float and cpu.can_reshape(lhs, rhs)):
        return False
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    return 3 * math.prod(shape) > _FEW_SUMS and math.prod(shape[:rank]) > _BLOCK_ROWS


def _dot_in_blocks(lhs, rhs, dims, order, out_dtype):
    """Contracts the digits of blocks of rows of lhs, in a loop.

    The sums of three digits take three times the memory of the result. Those of a block
    stay in the cache until they are put together. The last block overlaps the one
    before it where the rows do not divide: no row's sums depend on the others.
    """
    (lhs_ca, rhs_ca), _ = dims
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    rank = lhs.ndim - len(lhs_ca)
    rows, columns = math.prod(shape[:rank]), math.prod(shape[rank:])
    size = max(_BLOCK_ROWS, _BLOCK_SUMS // (3 * columns))
    blocks = -(-rows // size)
    size = -(-rows // blocks)
    stack, unit = digits.of_floats(lhs, lhs_ca, digits.count_for(lhs, out_dtype))
    stack = stack.reshape(-1, rows, *lhs.shape[rank:])
    if rhs.dtype == jnp.int4:  # Widened once.
        rhs = rhs.astype(jnp.int8)
    block_dims = (tuple(range(2, stack.ndim)), rhs_ca), ((), ())

    def insert(index, out):
        start = jnp.minimum(index * size, rows - size)
        block = lax.dynamic_slice_in_dim(stack, start, size, axis=1)
        largest = digits.LARGEST, None
        sums = integer_dot(block, rhs, block_dims, largest=largest)
        part = digits.combine(sums.astype(jnp.float32), 0)
        return lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    start = lax.full_like(stack, 0, jnp.float32, (rows, *shape[rank:]))
    out = lax.fori_loop(0, blocks, insert, start).reshape(shape)
    out = out * dn.lhs_scale_to_output(unit, dims, rhs.ndim)
    return out if order is None else out.transpose(order)

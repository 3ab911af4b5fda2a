"""Dots of int8 by int4 that lie two in a byte, on XLA:CPU.

XLA:CPU stores int4 in pairs, and reads them one by one. As bytes, both halves take a
shift or a mask of whole vectors. Columns are widened a block at a time, into a buffer
that stays in the cache, and contracted from there.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import cpu, plain, processor
from aqtlite.shapes import dimension_numbers as dn

_MATRICES = ((1,), (1,)), ((), ())

# Up to this number of rows, widening takes a notable part of the time.
_ROWS = 512

# Weights of fewer elements are widened whole; packed ones are bytes already.
_FEW_WEIGHTS, _FEW_PACKED = 2**18, 2**15

# Number of int4 that are widened at a time, for up to `_FEW_ROWS` and for more.
_BLOCK, _LARGE_BLOCK = 2**18, 2**20
_FEW_ROWS = 32

# The kernels compute this number of columns at a time.
_TILE = 4

_SIGNS = np.uint8(0x88)
_LOW = np.uint8(0x0F)
_HALF = np.uint8(4)
_OFFSET = np.int32(8)


def has_fast_form(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> bool:
    """Returns True if `dot` supports operands and takes less time than `cpu.dot`."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    if rhs.dtype != jnp.int4 or batch or len(lhs_ca) != 1:
        return False
    is_last = lhs_ca == (lhs.ndim - 1,) and rhs_ca == (rhs.ndim - 1,)
    if not (is_last and cpu.can_reshape(lhs, rhs)) or lhs.shape[-1] % 2:
        return False
    rows = math.prod(lhs.shape[:-1])
    return 0 < rows <= _ROWS and math.prod(rhs.shape) >= _FEW_WEIGHTS


def pays_packed(rows: int, weights: int) -> bool:
    """Returns True if `sums` of packed weights takes less time than widening them."""
    return 0 < rows <= _ROWS and weights >= _FEW_PACKED


def dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts int4 or int8 with int4, both along their last axis, to int32."""
    products = rhs.shape[-1]
    weights = as_bytes(rhs.reshape(-1, products))
    out = sums(lhs.reshape(-1, products), weights)
    return out.reshape(dn.output_shape(dims, lhs.shape, rhs.shape))


def as_bytes(weights: jax.Array) -> jax.Array:
    """Returns a matrix of int4 as uint8, ``(rows, columns / 2)``.

    The lower half of a byte holds the first of a pair of columns, both raised by 8. A
    column of zeros is appended to an odd number.
    """
    weights = plain.with_zeros(weights, 1, weights.shape[1] % 2)
    rows, columns = weights.shape
    pairs = weights.reshape(rows, columns // 2, 2)
    return lax.bitwise_xor(lax.bitcast_convert_type(pairs, jnp.uint8), _SIGNS)


def sums(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Contracts the rows of a matrix with the rows of weights.

    No consumer is fused into the loop over blocks, so that consumers are compiled alike
    whether weights are computed or given. The last blocks may overlap.

    Args:
        x: int4 or int8, ``(rows, products)``.
        weights: from `as_bytes`, of the same number of products.

    Returns:
        int32, ``(rows, columns)``.
    """
    rows, (columns, pairs) = x.shape[0], weights.shape
    x = plain.with_zeros(x.astype(jnp.int8), 1, 2 * pairs - x.shape[1])
    halves = [lax.slice_in_dim(x, half, None, 2, axis=1) for half in (0, 1)]
    # Processors that multiply uint8 by int8 take the halves as they are.
    is_raised = processor.has_unsigned_dots()
    part = _part_of_raised if is_raised else _part_of_signed
    padding = -rows % _TILE if is_raised else int(rows == 1)
    halves = [plain.with_zeros(half, 0, padding) for half in halves]

    def of_rows(out):
        if not is_raised:
            return out[:rows]
        excess = jnp.sum(x, axis=1, dtype=jnp.int32, keepdims=True)
        return out[:rows] - _OFFSET * excess

    block = _BLOCK if rows <= _FEW_ROWS else _LARGE_BLOCK
    count = -(-columns * 2 * pairs // block)
    size = -(-columns // count)

    if size == columns:
        return of_rows(part(halves, weights))

    def insert(index, out):
        start = lax.min(lax.mul(index, np.int32(size)), np.int32(columns - size))
        values = part(halves, lax.dynamic_slice_in_dim(weights, start, size))
        return lax.dynamic_update_slice_in_dim(out, values, start, axis=1)

    out = lax.full_like(x, 0, jnp.int32, (rows + padding, columns))
    return of_rows(lax.fori_loop(0, -(-columns // size), insert, out))


def _part_of_raised(halves: list[jax.Array], weights: jax.Array) -> jax.Array:
    """The sums of a block of weights, as uint8 that are larger by 8.

    XLA's kernels read lhs as it is, which are therefore the weights.
    """
    low, high = lax.bitwise_and(weights, _LOW), lax.shift_right_logical(weights, _HALF)
    parts = zip((low, high), halves, strict=True)
    out, other = (cpu.mixed_dot(w, x, _MATRICES) for w, x in parts)
    return (out + other).T


def _part_of_signed(halves: list[jax.Array], weights: jax.Array) -> jax.Array:
    """The sums of a block of weights, as int8."""
    signed = lax.bitcast_convert_type(lax.bitwise_xor(weights, _SIGNS), jnp.int8)
    half = np.int8(_HALF)
    low = lax.shift_right_arithmetic(lax.shift_left(signed, half), half)
    high = lax.shift_right_arithmetic(signed, half)
    return plain.dot(halves[0], low, _MATRICES) + plain.dot(halves[1], high, _MATRICES)

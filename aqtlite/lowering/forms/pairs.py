"""Dots of int8 by int4 that lie two in a byte, on XLA:CPU.

XLA:CPU stores int4 in pairs, and reads them one by one. As bytes, both halves take a
shift or a mask of whole vectors. Columns are widened a block at a time, into a buffer
that stays in the cache, and contracted from there.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.forms import cpu, plain, processor
from aqtlite.shapes import dimension_numbers as dn

_MATRICES = ((1,), (1,)), ((), ())

# Up to this number of rows, widening takes a notable part of the time.
_ROWS = 512

# Weights of fewer elements are widened whole; packed ones are bytes already.
_FEW_WEIGHTS, _FEW_PACKED = 2**18, 2**15

# Number of int4 that are widened at a time, for up to `_FEW_ROWS` and for more.
_BLOCK, _LARGE_BLOCK = 2**18, 2**20
_FEW_ROWS = 32

# On processors that multiply uint8 by int8, the weights are lhs up to this number of
# rows: the first, or the second for sums of many products. XLA's kernels read lhs as it
# is, and lay out rhs anew; but the sums then have to be transposed.
_ROWS_OF_FEW, _ROWS_OF_MANY, _MANY_PRODUCTS = 4, 32, 512

# These kernels compute a multiple of this number of rows.
_TILE = 4

_SIGNS = np.uint8(0x88)
_LOW = np.uint8(0x0F)
_HALF = np.uint8(4)
_OFFSET = np.int32(8)

_Part = Callable[[list[jax.Array], jax.Array], jax.Array]


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

    The lower half of a byte holds the first of a pair of columns. A column of zeros is
    appended to an odd number.
    """
    weights = plain.with_zeros(weights, 1, weights.shape[1] % 2)
    rows, columns = weights.shape
    return lax.bitcast_convert_type(weights.reshape(rows, columns // 2, 2), jnp.uint8)


def values_of(pairs: jax.Array) -> jax.Array:
    """Returns the values of `as_bytes`, given as int8, as int8."""
    return jnp.stack(_halves(pairs), axis=-1).reshape(len(pairs), -1)


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
    rows, products = x.shape[0], 2 * weights.shape[1]
    x = plain.with_zeros(x.astype(jnp.int8), 1, products - x.shape[1])
    halves = [lax.slice_in_dim(x, half, None, 2, axis=1) for half in (0, 1)]
    few = _ROWS_OF_MANY if products >= _MANY_PRODUCTS else _ROWS_OF_FEW
    if processor.has_unsigned_dots() and rows <= few:
        halves = [plain.with_zeros(half, 0, -rows % _TILE) for half in halves]
        out = _by_blocks(_part_of_raised, halves, weights)[:rows]
        return out - _OFFSET * jnp.sum(x, axis=1, dtype=jnp.int32, keepdims=True)
    if not processor.multiplies_unsigned(rows):
        # A product with a vector is not on the fast path.
        halves = [plain.with_zeros(half, 0, int(rows == 1)) for half in halves]
        return _by_blocks(_part_of_signed, halves, weights)[:rows]
    halves = [cpu.offset_by_128(plain.with_zeros(half, 0, 1)) for half in halves]
    out = _by_blocks(_part_of_signed, halves, weights)
    # The last row, zeros before the offset, has the sums of the offset.
    return out[:rows] - out[rows:]


def _by_blocks(part: _Part, halves: list[jax.Array], weights: jax.Array) -> jax.Array:
    """Contracts blocks of columns in a loop; a single one without."""
    rows, (columns, pairs) = halves[0].shape[0], weights.shape
    block = _BLOCK if rows <= _FEW_ROWS else _LARGE_BLOCK
    size = -(-columns // -(-2 * columns * pairs // block))
    if size == columns:
        return part(halves, weights)

    def insert(index, out):
        start = lax.min(lax.mul(index, np.int32(size)), np.int32(columns - size))
        values = part(halves, lax.dynamic_slice_in_dim(weights, start, size))
        return lax.dynamic_update_slice_in_dim(out, values, start, axis=1)

    out = lax.full_like(weights, 0, jnp.int32, (rows, columns))
    return lax.fori_loop(0, -(-columns // size), insert, out)


def _part_of_raised(halves: list[jax.Array], weights: jax.Array) -> jax.Array:
    """The sums of a block of weights, as uint8 that are larger by 8, as lhs."""
    weights = lax.bitwise_xor(weights, _SIGNS)
    low, high = lax.bitwise_and(weights, _LOW), lax.shift_right_logical(weights, _HALF)
    parts = zip((low, high), halves, strict=True)
    out, other = (cpu.mixed_dot(w, x, _MATRICES) for w, x in parts)
    return (out + other).T


def _part_of_signed(halves: list[jax.Array], weights: jax.Array) -> jax.Array:
    """The sums of a block of weights, as int8, as rhs."""
    low, high = _halves(lax.bitcast_convert_type(weights, jnp.int8))
    contract = plain.dot if halves[0].dtype == jnp.int8 else cpu.mixed_dot
    return contract(halves[0], low, _MATRICES) + contract(halves[1], high, _MATRICES)


def _halves(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lower and the upper halves of bytes, int8, as signed integers."""
    half = np.int8(_HALF)
    low = lax.shift_right_arithmetic(lax.shift_left(pairs, half), half)
    return low, lax.shift_right_arithmetic(pairs, half)

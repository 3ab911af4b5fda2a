"""int8 contractions on XLA:CPU's fast path; off that path it runs a plain loop."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.elementwise import spread
from aqtlite.lowering.forms import layouts, plain, processor
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import explicit_sharding

Shape = tuple[int, ...]

# Up to this number of rows, reading rhs dominates the time.
_FEW_ROWS = 64

# A matrix of this many bytes stays in the L1 cache, in whatever order it is read: it is
# not worth the kernels of a loop that transposes it, nor of a second contraction.
_FEW_BYTES = 2**14

# Number of rows that are transposed at a time.
_BLOCK = 16

# XLA:CPU of old versions of JAX divides products of few rows by a matrix of more
# elements among threads. Up to four times as many take longer than on one thread.
_UNDIVIDED, _ROWS_OF_PARTS = 2**17, 8


def is_fast(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    """Returns True if a plain `lax.dot_general` is on the fast path."""
    of = _Layout.of(lhs_shape, rhs_shape, dims)
    return not (
        processor.multiplies_unsigned(of.rows)
        or of.is_transposed
        or of.is_matrix_of_rows
        or of.is_in_the_middle
        or 1 in (of.rows, of.columns)
    )


class _Layout(NamedTuple):
    """The order of the axes of a contraction's operands."""

    rows: int
    """Number of rows of lhs as a matrix."""

    columns: int
    """Number of columns of rhs as a matrix."""

    is_transposed: bool
    """Whether lhs has a remaining axis after a contracting one."""

    is_matrix_of_rows: bool
    """Whether rhs has over two axes, and both operands contract their last axes."""

    is_in_the_middle: bool
    """Whether lhs contracts its last axes, and rhs neither its first nor its last.

    This holds for the stacked digits of a weight, unless it is stored transposed."""

    @classmethod
    def of(cls, lhs_shape: Shape, rhs_shape: Shape, dims: dn.DimensionNumbers):
        (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
        lhs_ra = dn.remaining_axes(len(lhs_shape), lhs_ca, lhs_ba)
        rhs_ra = dn.remaining_axes(len(rhs_shape), rhs_ca, rhs_ba)
        count = len(lhs_ca)
        first = tuple(range(count))
        lhs_last, rhs_last = (
            tuple(range(len(shape) - count, len(shape)))
            for shape in (lhs_shape, rhs_shape)
        )
        is_last = lhs_ca == lhs_last and not lhs_ba
        return cls(
            rows=math.prod(lhs_shape[axis] for axis in lhs_ra),
            columns=math.prod(rhs_shape[axis] for axis in rhs_ra),
            is_transposed=bool(lhs_ra and lhs_ca) and max(lhs_ra) > min(lhs_ca),
            is_matrix_of_rows=(
                is_last and rhs_ca == rhs_last and count > 0 and len(rhs_shape) > 2
            ),
            is_in_the_middle=is_last and rhs_ca not in (first, rhs_last),
        )


def dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts int8 with int8 to int32, on the fast path.

    - A product with a vector is not on the fast path: a single row of lhs, or column of
      rhs, gets a row of zeros beside it.
    - A transposed lhs by one column is computed as that column, as a row, by lhs.
    - A transposed lhs is not on the fast path, and XLA folds a transposition before the
      dot back into it; but not in a loop, nor with a second contracting axis, which may
      have size one.
    - The contracting axes of rhs are copied to its front, unless they are last.
    - Some processors only multiply uint8 by int8 fast (`unsigned_dot`).
    """
    of = _Layout.of(lhs.shape, rhs.shape, dims)
    if of.is_matrix_of_rows and can_reshape(lhs, rhs):
        return _dot_with_matrix(lhs, rhs, contracted=len(dims[0][0]))
    if of.is_in_the_middle and can_reshape(lhs, rhs):
        return _dot_with_leading_axes(lhs, rhs, dims[0][1])
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    rows, has_one_column = of.rows, of.columns == 1
    if has_one_column and of.is_transposed and rows != 1:
        return dot(rhs, lhs, dn.transpose(dims)).reshape(shape)
    # For one column, reading lhs dominates the time, and the offset reads it once more.
    is_unsigned = processor.multiplies_unsigned(rows) and not has_one_column
    products = dn.contraction_size(dims, lhs.shape)
    few = _FEW_ROWS if is_unsigned and can_reshape(lhs) else 1
    is_copied = (is_unsigned or of.is_transposed) and not has_one_column
    has_few_rows = isinstance(rows, int) and (
        rows <= few
        or (is_copied and can_reshape(lhs) and rows * products <= _FEW_BYTES)
    )
    if (
        not (has_few_rows or has_one_column)
        and dims[0][0] == dims[0][1] == tuple(range(len(dims[0][0])))
        and not dims[1][0]
        and can_reshape(lhs, rhs)
        and is_transposed_in_blocks(products)
    ):
        return _dot_of_transposed(lhs, rhs, contracted=len(dims[0][0]))
    if has_few_rows:
        lhs, dims = _with_row_of_zeros(lhs, dims, rows)
    if has_one_column:
        rhs, exchanged = _with_row_of_zeros(rhs, dn.transpose(dims), 1)
        dims = dn.transpose(exchanged)
    if len(dims[0][0]) == 1 and of.is_transposed and not has_few_rows:
        lhs, rhs, dims = _with_unit_axis(lhs, rhs, dims)
    batch_rank = len(dims[1][0])
    if not is_unsigned:
        out = plain.dot(lhs, rhs, dims)
    elif has_few_rows and (parts := _parts(rows, rhs, dims)) > 1:
        out = _dot_with_parts(offset_by_128(lhs), rhs, parts)
    elif has_few_rows:
        out = unsigned_dot_of_zeros(offset_by_128(lhs), rhs, dims)
    else:
        out = unsigned_dot(offset_by_128(lhs), rhs, dims)
    if has_few_rows:
        out = lax.slice_in_dim(out, 0, rows, axis=batch_rank)
    if has_one_column:
        out = lax.index_in_dim(out, 0, axis=-1, keepdims=False)
    return out.reshape(shape)


def sums_halves(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> bool:
    """Returns True if XLA:CPU sums these floats in float32 without widening them first.

    It does so for bfloat16 and float16 in few layouts, and has no kernel for others.
    """
    (lhs_ca, rhs_ca), (batch, _) = dims
    is_matrices = lhs.ndim == rhs.ndim == 2 and not batch
    is_row_by_column = lhs_ca == (1,) and len(rhs_ca) == 1
    is_wide = jnp.finfo(lhs.dtype).bits > 16
    return is_wide or (is_matrices and is_row_by_column)


def _dot_with_matrix(lhs, rhs, contracted):
    """Contracts the last axes, with the remaining axes of rhs merged into one."""
    products = math.prod(rhs.shape[-contracted:])
    out = dot(
        lhs.reshape(*lhs.shape[:-contracted], products),
        rhs.reshape(math.prod(rhs.shape[:-contracted]), products),
        (((lhs.ndim - contracted,), (1,)), ((), ())),
    )
    return out.reshape(lhs.shape[:-contracted] + rhs.shape[:-contracted])


def _dot_with_leading_axes(lhs, rhs, contracting):
    """Moves rhs's contracting axes to its front, as XLA would, and contracts matrices.

    The sums then have the same form as with a transposed rhs, and XLA compiles their
    consumers alike.
    """
    rest = dn.remaining_axes(rhs.ndim, contracting, ())
    moved = rhs.transpose(*contracting, *rest)
    shape = moved.shape[len(contracting) :]
    products = math.prod(rhs.shape[axis] for axis in contracting)
    rows = lhs.shape[: lhs.ndim - len(contracting)]
    out = dot(
        lhs.reshape(*rows, products),
        moved.reshape(products, math.prod(shape)),
        (((len(rows),), (0,)), ((), ())),
    )
    return out.reshape(rows + shape)


def merged(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers
) -> tuple[jax.Array, jax.Array, dn.DimensionNumbers]:
    """Merges contracting axes that come last in both operands into one.

    Operands with other axes, and their dimension numbers, are returned unchanged.
    """
    (lhs_ca, rhs_ca), (batch, _) = dims
    count = len(lhs_ca)
    are_last = layouts.is_last(lhs.ndim, lhs_ca) and layouts.is_last(rhs.ndim, rhs_ca)
    if count < 2 or batch or not are_last or not can_reshape(lhs, rhs):
        return lhs, rhs, dims
    lhs, rhs = (
        x.reshape(*x.shape[:-count], math.prod(x.shape[-count:])) for x in (lhs, rhs)
    )
    return lhs, rhs, (((lhs.ndim - 1,), (rhs.ndim - 1,)), ((), ()))


def can_reshape(*operands: jax.Array) -> bool:
    """Returns True if all sizes are known, and no axis has an explicit sharding."""
    sizes = [size for x in operands for size in x.shape]
    is_known = all(isinstance(size, int) for size in sizes)
    return is_known and all(explicit_sharding(x) is None for x in operands)


def _dot_of_transposed(lhs, rhs, contracted):
    """Contracts leading axes, by transposing lhs in blocks first."""
    products = math.prod(lhs.shape[:contracted])

    def matrix(x):
        x = x.reshape(products, math.prod(x.shape[contracted:]))
        return plain.with_zeros(x, 0, -products % _BLOCK)

    dims = ((1,), (0,)), ((), ())
    if processor.multiplies_unsigned(math.prod(lhs.shape[contracted:])):
        out = unsigned_dot(_transpose(offset_by_128(matrix(lhs))), matrix(rhs), dims)
    else:
        out = plain.dot(_transpose(matrix(lhs)), matrix(rhs), dims)
    return out.reshape(lhs.shape[contracted:] + rhs.shape[contracted:])


def is_transposed_in_blocks(rows: int) -> bool:
    """Returns True if a matrix of this many rows is transposed block by block.

    XLA would fold a transposition of a single block into the dot.
    """
    return rows > _BLOCK


def transposed_matrix(x: jax.Array) -> jax.Array:
    """Transposes a matrix of bytes, padded with zeros to whole blocks of rows."""
    x = plain.with_zeros(x, 0, -x.shape[0] % _BLOCK)
    # XLA:CPU copies narrow floats by widening them.
    words = lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(_transpose(words), x.dtype)


def _transpose(x):
    """Transposes a matrix of whole blocks of rows, one block at a time.

    XLA:CPU would fuse the computation of x into a transposing copy, and run it a second
    time, in strides that miss the cache at every element. It fuses nothing into a loop,
    and the rows of a block stay in the cache.
    """
    rows, columns = x.shape

    def insert(index, transposed):
        start = index * _BLOCK
        block = lax.dynamic_slice_in_dim(x, start, _BLOCK)
        return lax.dynamic_update_slice_in_dim(transposed, block.T, start, axis=1)

    out = lax.full_like(x, 0, shape=(columns, rows))
    return lax.fori_loop(0, rows // _BLOCK, insert, out)


def _with_row_of_zeros(lhs, dims, rows):
    """Lays out lhs as ``(*batch, rows + 1, *contracting)``, the last row zeros."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    sizes = [lhs.shape[axis] for axis in lhs_ba], [lhs.shape[axis] for axis in lhs_ca]
    remaining = dn.remaining_axes(lhs.ndim, lhs_ca, lhs_ba)
    ordered = lhs.transpose(lhs_ba + remaining + lhs_ca)
    matrix = ordered.reshape(*sizes[0], rows, *sizes[1])
    row, last = len(lhs_ba), len(lhs_ba) + len(lhs_ca)
    dims = (tuple(range(row + 1, last + 1)), rhs_ca), (tuple(range(row)), rhs_ba)
    return plain.with_zeros(matrix, row, 1), dims


def _parts(rows, rhs, dims):
    """Returns the number of parts of rhs for `_dot_with_parts`; 1 if that is slower."""
    (_, rhs_ca), (batch, _) = dims
    is_matrix = rhs.ndim == 2 and rhs_ca == (1,) and not batch and can_reshape(rhs)
    if rows > _ROWS_OF_PARTS or not (is_matrix and processor.HAS_OLD_KERNELS):
        return 1
    parts = next((n for n in (1, 2, 4) if rhs.size <= n * _UNDIVIDED), 1)
    return parts if rhs.shape[0] % parts == 0 else 1


def _dot_with_parts(lhs, rhs, parts):
    """Contracts rows, the last one zeros, with parts of a matrix as a batch.

    XLA:CPU does not divide a batch among threads.
    """
    columns, products = rhs.shape
    stack = rhs.reshape(parts, columns // parts, products)
    rows = jnp.broadcast_to(lhs, (parts, *lhs.shape))
    out = unsigned_dot_of_zeros(rows, stack, (((2,), (2,)), ((0,), (0,))))
    return out.transpose(1, 0, 2).reshape(-1, columns)


def _with_unit_axis(lhs, rhs, dims):
    """Adds a contracting axis of size one next to the only one of both operands."""
    sides = []
    for x, (axis,), batch in zip((lhs, rhs), *dims, strict=True):
        after = tuple(a + (a >= axis) for a in batch)
        sides.append((jnp.expand_dims(x, axis), (axis, axis + 1), after))
    operands, contracting, batch = zip(*sides, strict=True)
    return *operands, (contracting, batch)


def offset_by_128(x: jax.Array) -> jax.Array:
    """Adds 128 to int8, as uint8: flips the sign bit.

    Some processors only multiply uint8 by int8: ``lhs . rhs = (lhs + 128) . rhs - 128 .
    rhs``. Intermediate sums wrap modulo 2^32, so that the result is exact if it fits
    int32.
    """
    return lax.bitcast_convert_type(lax.bitwise_xor(x, np.int8(-128)), jnp.uint8)


def unsigned_dot(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers
) -> jax.Array:
    """Contracts an offset lhs with int8 to int32, and removes the offset from the sums.

    The offset adds 128 . rhs to the sums, which is contracted as two rows: XLA:CPU has
    no fast path for one.
    """
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    rank = len(lhs_ba)
    batch, products = (tuple(lhs.shape[a] for a in axes) for axes in (lhs_ba, lhs_ca))
    rows = jnp.full((*batch, 2, *products), 128, jnp.uint8)
    rows_ca, rows_ba = tuple(range(rank + 1, rows.ndim)), tuple(range(rank))
    excess = mixed_dot(rows, rhs, ((rows_ca, rhs_ca), (rows_ba, rhs_ba)))
    excess = lax.index_in_dim(excess, 0, axis=rank, keepdims=False)
    remaining = dn.remaining_axes(lhs.ndim, lhs_ca, lhs_ba)
    axes = tuple(range(rank, rank + len(remaining)))
    return mixed_dot(lhs, rhs, dims) - jnp.expand_dims(excess, axes)


def unsigned_dot_of_zeros(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers
) -> jax.Array:
    """Contracts an offset lhs with a last row of zeros (before the offset).

    The sums of that row are 128 . rhs. lhs is ``(*batch, rows, *contracting)``.
    """
    out = mixed_dot(lhs, rhs, dims)
    of_zeros = lax.slice_in_dim(out, -1, None, axis=len(dims[1][0]))
    return lax.sub(out, spread(of_zeros, out.shape))


def mixed_dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts uint8 with int8 to int32.

    With a preset algorithm, JAX keeps the dtypes of the operands; otherwise it casts
    both to int32 on CPUs.
    """
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=lax.DotAlgorithmPreset.DEFAULT,
        preferred_element_type=jnp.int32,
    )

"""Contractions in the layouts and sizes that TPU matrix units take at their full rate.

On v5e and v5p, XLA multiplies int8 at twice the rate of bfloat16 if the contracting
axis of lhs is contiguous, and at bfloat16's rate if it is not, as in drhs, which
contracts the rows of both operands. Written transposed, lhs costs less than that where
there are enough columns to multiply it with. v4, v6e and v7 gain nothing.

XLA computes the product of a single row with a matrix in the vector unit, and that of
two rows in the matrix units. For 4096 x 4096 int8 weights, it expects 203,299 and 9,955
cycles on v5e, 127,297 and 13,732 on v6e. A row by a large matrix is therefore padded.
It gives a matrix of several remaining axes, as of heads and head width, another layout
at every call. Merged to one axis, the matrix is read as it is, which matters where
there are few rows.

(XLA's estimates of cycles, of programs compiled by libtpu 0.0.42: ``python -m
benchmarks.tpu_estimate``.)
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from aqtlite.lowering.forms import layouts, plain, processor
from aqtlite.lowering.target import Target
from aqtlite.shapes import dimension_numbers as dn

# Least sizes at which the contraction gains more than the transposition costs.
_PRODUCTS = 1024
_COLUMNS = 2048

# Least number of weights with which a row is padded, and the number of rows then.
_WEIGHTS = 2**18
_ROWS = 8

# The number of rows up to which the axes of a matrix are merged.
_FEW = 512


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    target: Target,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Contracts integers to int32 and floats to float32, in the faster form."""
    side = few_rows((lhs.shape, rhs.shape), lhs.dtype, dims)
    if side is not None:
        return _of_rows(side, lhs, rhs, dims, precision)
    if jnp.issubdtype(lhs.dtype, jnp.floating):
        return plain.dot(lhs, rhs, dims, precision=precision)
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    pays = _is_large(lhs.shape, rhs.shape, dims) and processor.tpu_reads_rows()
    if pays and target.takes_layouts:
        lhs, lhs_ca, lhs_ba = layouts.contracting_last(lhs, lhs_ca, lhs_ba)
    return plain.dot(lhs, rhs, ((lhs_ca, rhs_ca), (lhs_ba, rhs_ba)))


def few_rows(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DTypeLike,
    dims: dn.DimensionNumbers,
) -> int | None:
    """Returns the side (0, 1) of rows that `dot` pads, or whose matrix it reshapes.

    None for none: many rows, several by a matrix of two axes or one that is not stored
    by columns, or a small matrix.
    """
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits > 16:
        return None  # The matrix units would round it to bfloat16.
    contracting, (batch, _) = dims
    if batch or not all(isinstance(size, int) for size in (*shapes[0], *shapes[1])):
        return None
    for side, (shape, other) in enumerate((shapes, shapes[::-1])):
        axes = dn.remaining_axes(len(shape), contracting[side], ())
        columns = dn.remaining_axes(len(other), contracting[1 - side], ())
        # Frozen weights are stored with their contracting axes last.
        is_stored = columns == tuple(range(len(columns)))
        most = _FEW if is_stored and len(columns) > 1 else 1
        is_few = bool(axes) and math.prod(shape[axis] for axis in axes) <= most
        has_columns = math.prod(other[axis] for axis in columns) > 1
        if is_few and has_columns and math.prod(other) >= _WEIGHTS:
            return side
    return None


def _of_rows(
    side: int,
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Contracts the rows of a side, of which there are several, with a matrix."""
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    (lhs_ca, rhs_ca), batch = dims
    if side == 0:
        lhs = _with_rows(lhs, lhs_ca)
        rhs, rhs_ca = _merged(rhs, rhs_ca)
    else:
        lhs, lhs_ca = _merged(lhs, lhs_ca)
        rhs = _with_rows(rhs, rhs_ca)
    out = plain.dot(lhs, rhs, ((lhs_ca, rhs_ca), batch), precision=precision)
    if out.size != math.prod(shape):
        axis = lhs.ndim - len(lhs_ca) - 1 if side == 0 else out.ndim - 1
        out = lax.slice_in_dim(out, 0, 1, axis=axis)
    else:
        # Without the barrier, XLA splits the axis again.
        out = lax.optimization_barrier(out)
    return out.reshape(shape)


def _merged(x: jax.Array, contracting: dn.Axes) -> tuple[jax.Array, dn.Axes]:
    """Merges adjacent remaining axes, and returns the contracting axes then."""
    axes = dn.remaining_axes(x.ndim, contracting, ())
    first, count = axes[0], len(axes)
    if axes != tuple(range(first, first + count)):
        return x, contracting
    sizes = x.shape[:first], x.shape[first : first + count], x.shape[first + count :]
    matrix = x.reshape(*sizes[0], math.prod(sizes[1]), *sizes[2])
    moved = tuple(a if a < first else a - count + 1 for a in contracting)
    return matrix, moved


def _with_rows(x: jax.Array, contracting: dn.Axes) -> jax.Array:
    """Appends rows of zeros to a single row; returns several as they are."""
    axes = dn.remaining_axes(x.ndim, contracting, ())
    if math.prod(x.shape[axis] for axis in axes) > 1:
        return x
    # Without the barrier, XLA takes them away again.
    return lax.optimization_barrier(plain.with_zeros(x, axes[-1], _ROWS - 1))


def _is_large(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    (lhs_ca, rhs_ca), (_, rhs_ba) = dims
    columns = dn.remaining_axes(len(rhs_shape), rhs_ca, rhs_ba)
    sizes = (
        ([lhs_shape[axis] for axis in lhs_ca], _PRODUCTS),
        ([rhs_shape[axis] for axis in columns], _COLUMNS),
    )
    return all(
        all(isinstance(size, int) for size in found) and math.prod(found) >= least
        for found, least in sizes
    )

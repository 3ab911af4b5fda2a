"""int8 contractions on XLA:CPU's fast path, off which it runs a plain loop."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import dimension_numbers as dn
from aqtlite.lowering import plain
from aqtlite.sharding import explicit_sharding


def is_fast(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    """Whether the contraction is on the fast path as it stands."""
    return not (
        _is_transposed(len(lhs_shape), dims)
        or _contracts_last_axes(lhs_shape, rhs_shape, dims)
        or _has_one_row(lhs_shape, dims)
        or _has_one_row(rhs_shape, dn.transpose(dims))
    )


def dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts int8 with int8 to int32.

    - A product with a vector falls off it: one row, of either side, is made two.
    - A transposed lhs falls off it, whatever is done about the transposition, but not
      with a second contracting axis, which may have size one.
    - rhs's contracting axes are moved to its front, by a copy, unless it is a matrix.
    """
    if _contracts_last_axes(lhs.shape, rhs.shape, dims) and _can_reshape(lhs, rhs):
        return _dot_with_matrix(lhs, rhs, contracted=len(dims[0][0]))
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    one_lhs_row = _has_one_row(lhs.shape, dims)
    one_rhs_row = _has_one_row(rhs.shape, dn.transpose(dims))
    has_rows = not (one_lhs_row or one_rhs_row)
    if has_rows and _contracts_leading_axes(dims) and _can_reshape(lhs, rhs):
        return _dot_over_blocks(lhs, rhs, contracted=len(dims[0][0]))
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
    out = plain.dot(lhs, rhs, dims, jnp.int32)
    if one_lhs_row:
        out = lax.index_in_dim(out, 0, axis=len(lhs_ba), keepdims=False)
    if one_rhs_row:
        out = lax.index_in_dim(out, 0, axis=-1, keepdims=False)
    return out.reshape(shape)


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


def _contracts_last_axes(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    """Whether rhs is a matrix ``(rows, products)`` by more than two axes."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    lhs_last, rhs_last = (
        tuple(range(len(shape) - len(rhs_ca), len(shape)))
        for shape in (lhs_shape, rhs_shape)
    )
    is_last = (lhs_ca, rhs_ca) == (lhs_last, rhs_last)
    return is_last and bool(rhs_ca) and not batch and len(rhs_shape) > 2


def _dot_with_matrix(lhs, rhs, contracted):
    """Contracts the last axes, the remaining ones of rhs taken as one."""
    products = math.prod(rhs.shape[-contracted:])
    out = dot(
        lhs.reshape(*lhs.shape[:-contracted], products),
        rhs.reshape(math.prod(rhs.shape[:-contracted]), products),
        (((lhs.ndim - contracted,), (1,)), ((), ())),
    )
    return out.reshape(lhs.shape[:-contracted] + rhs.shape[:-contracted])


def _contracts_leading_axes(dims):
    """Whether both operands are transposed and can be reshaped to a matrix each."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    return lhs_ca == rhs_ca == tuple(range(len(lhs_ca))) and not batch


def _can_reshape(*operands):
    """Whether all sizes are known, and no axis has an explicit sharding."""
    sizes = [size for x in operands for size in x.shape]
    is_known = all(isinstance(size, int) for size in sizes)
    return is_known and all(explicit_sharding(x) is None for x in operands)


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
    out = plain.dot(columns, blocks(rhs), dims, jnp.int32)
    return out.reshape(lhs.shape[contracted:] + rhs.shape[contracted:])


def _with_two_rows(x, contracting, batch):
    """Gives an operand with one row a second one, of zeros, before its sums."""
    named = [axis for axis in range(x.ndim) if axis in contracting + batch]
    x = x.reshape([x.shape[axis] for axis in named])
    contracting = tuple(named.index(axis) for axis in contracting)
    batch = tuple(named.index(axis) for axis in batch)
    row = min(contracting, default=x.ndim)
    x = plain.with_zeros(jnp.expand_dims(x, row), row, 1)
    return x, _after_insertion(contracting, row), _after_insertion(batch, row)


def _with_unit_axis(x, contracting, batch):
    """Gives the operand's one contracting axis a neighbour of size one."""
    (axis,) = contracting
    return jnp.expand_dims(x, axis), (axis, axis + 1), _after_insertion(batch, axis)


def _after_insertion(axes, at):
    return tuple(axis + (axis >= at) for axis in axes)

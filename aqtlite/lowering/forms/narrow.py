"""Contractions on CPUs of floats of 8 bits, which hold fp8, fp6 and fp4."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import float8, fusion
from aqtlite.lowering.forms import cpu, plain, processor
from aqtlite.shapes import dimension_numbers as dn

Units = tuple[float | None, float | None]

_LARGEST_INT8 = 127

# From this number of rows and columns on, XLA:CPU has one kernel for bfloat16, which
# sums in one order whatever the layout; the kernels for fewer do not.
_KERNEL = 16


def units_of_integers(
    units: Units, largest: tuple[int | None, int | None]
) -> tuple[float, float] | None:
    """Returns the units in which CPUs contract operands as integers, or None."""
    (lhs_unit, rhs_unit), (lhs_largest, rhs_largest) = units, largest
    if lhs_unit is None or not fits_int8(lhs_largest):
        return None
    if rhs_unit is None or not fits_int8(rhs_largest):
        return None
    return lhs_unit, rhs_unit


def fits_int8(largest: float | None) -> bool:
    """Returns True if int8 holds integers of a largest magnitude; None: not known."""
    return largest is not None and largest <= _LARGEST_INT8


def in_units(x: jax.Array, unit: float) -> jax.Array:
    """Converts floats to int8 multiples of a unit."""
    return (float8.widened(x) * np.float32(1 / unit)).astype(jnp.int8)


def dot_of_matrices(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, order: dn.Axes | None
) -> jax.Array | None:
    """Contracts operands as matrices, in bfloat16 where XLA:CPU sums that in float32.

    XLA:CPU does so if lhs's contracting axis is last. It would fold a transposition of
    the result into the dot, for which it has no kernel then: the operands are exchanged
    instead.

    Returns:
        The sums; None if axes of the operands or of the result would have to move.
    """
    (lhs_ca, rhs_ca), (batch, _) = dims
    if batch or not lhs_ca or not cpu.can_reshape(lhs, rhs):
        return None
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    if order not in (None, tuple(range(len(shape)))):
        rank = lhs.ndim - len(lhs_ca)
        if order != (*range(rank, len(shape)), *range(rank)):
            return None
        return dot_of_matrices(rhs, lhs, dn.transpose(dims), None)
    lhs_axis = _contracting_axis(lhs, lhs_ca)
    rhs_axis = _contracting_axis(rhs, rhs_ca)
    if lhs_axis is None or rhs_axis is None:
        return None
    left, right = _as_matrix(lhs, lhs_ca, lhs_axis), _as_matrix(rhs, rhs_ca, rhs_axis)
    products = left.shape[lhs_axis]
    can_transpose = lhs_axis == 1 or cpu.is_transposed_in_blocks(products)
    rows, columns = left.shape[1 - lhs_axis], right.shape[1 - rhs_axis]
    dtype = jnp.float32
    if products and can_transpose and processor.multiplies_bfloat16():
        dtype = jnp.bfloat16
        if lhs_axis == 0:
            left, lhs_axis = cpu.transposed_matrix(left), 1
            right = plain.with_zeros(right, rhs_axis, left.shape[1] - products)
        left = plain.with_zeros(left, 0, max(0, _KERNEL - rows))
        right = plain.with_zeros(right, 1 - rhs_axis, max(0, _KERNEL - columns))
    if dtype == jnp.float32:
        # The order of sums depends on the layout of producers fused into the dot.
        left, right = (fusion.barrier(float8.widened(x)) for x in (left, right))
    else:
        left, right = left.astype(dtype), right.astype(dtype)
    matmul = ((lhs_axis,), (rhs_axis,)), ((), ())
    out = plain.dot(left, right, matmul)
    return lax.slice(out, (0, 0), (rows, columns)).reshape(shape)


def _contracting_axis(x: jax.Array, contracting: dn.Axes) -> int | None:
    """The contracting axis of `x` as a matrix; None if axes would have to move."""
    count = len(contracting)
    if contracting == tuple(range(x.ndim - count, x.ndim)):
        return 1
    return 0 if contracting == tuple(range(count)) else None


def _as_matrix(x: jax.Array, contracting: dn.Axes, axis: int) -> jax.Array:
    products = math.prod(x.shape[a] for a in contracting)
    rest = math.prod(n for a, n in enumerate(x.shape) if a not in contracting)
    return x.reshape((products, rest) if axis == 0 else (rest, products))

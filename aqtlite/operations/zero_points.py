"""What zero points add to the sums of stored integers."""

import math

import jax
import jax.numpy as jnp

from aqtlite.lowering import DotInput, Integers, Kind
from aqtlite.operations.base import Lowered, Operation
from aqtlite.shapes.dimension_numbers import Axes


def contract(operation: Lowered, kind: Kind, lhs: DotInput, rhs: DotInput) -> jax.Array:
    """Contracts values less their zero points, taken off the sums where they may be.

    Args:
        operation: a contraction that sums over its contracting axes alone.
        kind: kind of dot.
        lhs: input to the dot.
        rhs: input to the dot.
    """
    products = operation.products(lhs.values.shape, rhs.values.shape)
    if not leave_sums(kind, lhs, rhs, products):
        return kind(operation, lhs.less_zero_point(), rhs.less_zero_point())
    sums = kind(operation, DotInput(lhs.values), DotInput(rhs.values))
    # All of it modulo 2^32: the result is within int32.
    return operation.masked(sums.astype(jnp.int32) - terms(operation, lhs, rhs))


def leave_sums(kind: Kind, lhs: DotInput, rhs: DotInput, products: int) -> bool:
    """Returns True if `terms` may be taken off the sums of what is stored.

    Stored values are then of 8 bits, and int32 holds all sums.

    Args:
        kind: of dot.
        lhs: the operand.
        rhs: the operand.
        products: in a sum; a symbolic number (jax.export) is taken to fit.
    """
    if not isinstance(kind, Integers):
        return False
    if lhs.zero_point is None and rhs.zero_point is None:
        return False
    is_wide = any(jnp.iinfo(one.values.dtype).bits > 8 for one in (lhs, rhs))
    bound = (lhs.largest or 0) * (rhs.largest or 0)
    is_long = isinstance(products, int) and products * bound >= 2**31
    return not (is_wide or is_long)


def terms(operation: Operation, lhs: DotInput, rhs: DotInput) -> jax.Array:
    """Computes ``sum a b - sum (a - za) (b - zb)``, modulo 2^32.

    That is ``sum (a - za) zb + za sum b``: sums over one operand each. Those of a
    frozen operand may be known. Zero points that vary along contracting axes are
    within the sums.

    Args:
        operation: a contraction that sums over its contracting axes alone.
        lhs: stored integers.
        rhs: the same. One of both has a zero point.
    """
    lhs_axes, rhs_axes = (operation.axes(side).contracting for side in ("lhs", "rhs"))
    found = []
    if rhs.zero_point is not None:
        a = lhs.values.astype(jnp.int32)
        if lhs.zero_point is not None:
            a = a - lhs.zero_point
        zb = rhs.zero_point
        if all(zb.shape[axis] == 1 for axis in rhs_axes):
            row = a.sum(lhs_axes, keepdims=True) if lhs.sums is None else lhs.sums
            row = operation.scale_to_output("lhs", row)
            found.append(row * operation.scale_to_output("rhs", zb))
        else:
            a = a * operation.rhs_scale_to_lhs(zb)
            row = a.sum(lhs_axes, keepdims=True)
            found.append(operation.scale_to_output("lhs", row))
    if lhs.zero_point is not None:
        za = lhs.zero_point
        if all(za.shape[axis] == 1 for axis in lhs_axes):
            column = operation.scale_to_output("rhs", _sums(rhs, rhs_axes))
            found.append(operation.scale_to_output("lhs", za) * column)
        else:
            b = rhs.values.astype(jnp.int32) * operation.lhs_scale_to_rhs(za)
            column = b.sum(rhs_axes, keepdims=True)
            found.append(operation.scale_to_output("rhs", column))
    return sum(found[1:], start=found[0])


def _sums(x: DotInput, axes: Axes) -> jax.Array:
    """The sums of stored integers over some axes, int32 and keepdims."""
    if x.sums is None:
        return x.values.astype(jnp.int32).sum(axes, keepdims=True)
    if x.zero_point is None:
        return x.sums
    count = math.prod(x.values.shape[axis] for axis in axes)
    return x.sums + count * x.zero_point

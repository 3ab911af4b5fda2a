"""Scales that vary along contracting axes, moved to the other operand.

A value cache has a scale for each position, and attention contracts positions. Such a
scale cannot be taken out of the sum, but it can multiply the other operand before that
one is quantized:

    sum_k p_k (s_k q_k) = sum_k (p_k s_k) q_k

Integers are still contracted with integers: ``q`` with the quantized ``p s``.
`aqtlite.contraction.execution.resolve` decides whether a scale moves; scales of blocks
of several elements do not, and cut the contraction into tiles.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.operations import OperandAxes, Operation, Side
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes


def is_of_elements(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], axes: OperandAxes
) -> bool:
    """Returns True if a scale varies along contracting axes, element by element.

    Args:
        shape: shape of the operand.
        scale_shape: shape of the scale.
        axes: axes of the operand.
    """
    counts = [(shape[axis], scale_shape[axis]) for axis in axes.contracting]
    is_varying = any(count != 1 for _, count in counts)
    return is_varying and all(count in (1, size) for size, count in counts)


def obstacle(
    operation: Operation,
    side: Side,
    scale_shape: tuple[int, ...],
    other_scale_shape: tuple[int, ...] | None,
    other: config.Tensor,
) -> str | None:
    """Returns why a scale cannot multiply the other operand; None if it can.

    Args:
        operation: the contraction.
        side: side of the operand that has the scale.
        scale_shape: shape of the scale.
        other_scale_shape: shape of the other operand's scale, None for an array.
        other: config of the other operand.
    """
    if other_scale_shape is not None:
        return (
            f"that is a QTensor as well, with a scale of shape {other_scale_shape}, "
            "and its integers are fixed"
        )
    if not operation.pairs_elements:
        return f"in a {type(operation).__name__} it belongs to several elements there"
    remaining = operation.axes(side).remaining
    varying = [axis for axis in remaining if scale_shape[axis] != 1]
    if varying:
        return f"it also varies along the axes {varying}, which that operand lacks"
    if other.calibration.needs_state:
        return (
            f"the range of that operand, calibration={other.calibration!r}, was found "
            "without the scale"
        )
    return None


def move(
    operation: Operation, side: Side, x: QTensor, other: Any
) -> tuple[QTensor, jax.Array]:
    """Moves the scale of one operand to the other.

    Gradients flow to the other operand, and to the float array that was rounded, if the
    `QTensor` carries it.

    Args:
        operation: the contraction.
        side: side of the operand that has the scale.
        x: a `QTensor`, with a scale of size 1 along remaining axes.
        other: floating.

    Returns:
        The `QTensor` with a scale of 1, and the other operand times the scale, both of
        float32 (float64 for float64), in which the product is rounded once.
    """
    scale = block_shapes.repeat(x.scale, x.shape, range(x.ndim))
    scale = jax.lax.stop_gradient(scale)
    if side == "lhs":
        factor = operation.lhs_scale_to_rhs(scale)
    else:
        factor = operation.rhs_scale_to_lhs(scale)
    unrounded = x.unrounded
    if unrounded is not None:
        # Channels of zeros, which have a scale of 0 on some grids, take no gradient.
        is_zero = scale == 0
        reciprocal = jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, scale))
        unrounded = exact.scaled(unrounded, reciprocal)
    unit = jnp.ones((1,) * x.ndim, jnp.float32)
    bare = dataclasses.replace(
        x, scale=unit, unrounded=unrounded, dtype=exact.wide_dtype(x.dtype)
    )
    return bare, exact.scaled(other, factor)

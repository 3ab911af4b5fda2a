"""Rotation: orthogonal matrices that cancel between the operands of a contraction.

A contraction sums ``lhs_j rhs_j`` over channels j, so that lhs and rhs may both be
multiplied with one orthogonal matrix along the channels. `config.Hadamard` has the
matrix, `aqtlite.lowering.hadamard` its product with an array.

Channels are the elements of the contracting axes that pair up: in a convolution the
input features, in each group, and not the window. Several such axes are taken for one,
the last of them running fastest. All blocks of a block-diagonal matrix are equal, so
that parts of an axis that consist of whole blocks can be rotated apart.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.lowering import exact, hadamard
from aqtlite.operations import SIDES, Operation
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes import block_shapes
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import replicated_along, with_sharding_of


def rotate(
    how: config.Hadamard | None,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    tensors: tuple[config.Tensor, config.Tensor],
    path: str,
) -> tuple[Operand, Operand]:
    """Rotates the operands of a contraction.

    Args:
        how: the rotation; None changes nothing.
        operation: the contraction.
        lhs: floating, or a `QTensor`, which is rotated already.
        rhs: like `lhs`.
        tensors: configs of the operands.
        path: path of the contraction in its config, for error messages.

    Returns:
        The operands. An operand that will be quantized is float32 (float64 for
        float64), so that it is rounded once; one that stays in floating point keeps its
        dtype.

    Raises:
        ValueError: if the size of the rotation does not divide the number of channels,
            or if the contraction has sums that a rotation would mix.
    """
    if how is None:
        return lhs, rhs
    order = order_of(how, operation, lhs.shape, rhs.shape, path)
    if order == 1:
        return lhs, rhs
    first, second = (
        x
        if isinstance(x, QTensor)
        else _rotated(x, operation.axes(side).cuttable, order, how.seed, tensor)
        for side, x, tensor in zip(SIDES, (lhs, rhs), tensors, strict=True)
    )
    return first, second


def channels_of(operation: Operation, lhs_shape: Axes) -> int:
    """Returns the number of channels that a rotation can mix.

    Args:
        operation: the contraction.
        lhs_shape: shape of lhs.
    """
    axes = operation.axes("lhs")
    return math.prod(lhs_shape[axis] for axis in axes.cuttable) // axes.groups


def order_of(
    how: config.Hadamard,
    operation: Operation,
    lhs_shape: Axes,
    rhs_shape: Axes,
    path: str,
) -> int:
    """Returns the number of channels that are mixed; 1 if nothing is rotated.

    Args:
        how: the rotation.
        operation: the contraction.
        lhs_shape: shape of lhs.
        rhs_shape: shape of rhs.
        path: path of the contraction in its config, for error messages.

    Raises:
        ValueError: as in `rotate`.
    """
    channels = channels_of(operation, lhs_shape)
    shapes = f"lhs of shape {tuple(lhs_shape)} and rhs of shape {tuple(rhs_shape)}"
    if operation.sums_in_groups:
        if how.fit:
            return 1
        raise ValueError(
            f"{path}.rotation={how!r} would mix the rows of several groups of a "
            f"{operation.name}, of {shapes}, which are summed apart: set fit=True to "
            f"rotate where that can be done, or {path}.rotation to None"
        )
    order = hadamard.largest_order(channels, how.size)
    if how.size is not None and order != how.size and not how.fit:
        raise ValueError(
            f"{path}.rotation.size={how.size} does not divide the {channels} channels "
            f"of a {operation.name}, of {shapes}: choose one that does, or set "
            "fit=True to rotate smaller blocks"
        )
    return order


def _rotated(
    x: jax.Array, axes: Axes, order: int, seed: int, tensor: config.Tensor
) -> jax.Array:
    """Rotates one operand."""
    own = np.dtype(x.dtype)
    wide = x if own == np.float64 else exact.float32(x)
    # Blocks lie in the last axes.
    first = len(axes) - 1
    while math.prod(x.shape[axis] for axis in axes[first:]) % order:
        first -= 1
    out = _along(wide, axes[first:], order, seed)
    return out if tensor.is_quantized else out.astype(own)


def _along(x: jax.Array, axes: Axes, order: int, seed: int) -> jax.Array:
    """Rotates blocks that reach over all of some axes."""
    if len(axes) == 1:
        return hadamard.rotated(x, axes[0], order, seed)
    start = min(axes)
    places = tuple(range(start, start + len(axes)))
    moved = jnp.moveaxis(replicated_along(x, axes), axes, places)
    merged = moved
    for _ in axes[1:]:
        merged = block_shapes.merge_with_next(merged, start)
    out = block_shapes.merge(hadamard.rotated(merged, start, order, seed), like=moved)
    return with_sharding_of(x, jnp.moveaxis(out, places, axes))

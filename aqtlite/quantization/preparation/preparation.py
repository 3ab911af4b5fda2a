"""What is done to the operands of a contraction before they are quantized."""

from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.operations import Operation
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization.preparation import padding, rotation, smoothing, sparsity


def prepare(
    raw: config.DotGeneralRaw,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    state: Any = (),
) -> tuple[Operand, Operand]:
    """Smooths and rotates the operands of a forward contraction, and prunes weights.

    Args and errors are those of `smooth_and_rotate` and `sparsity.prune`.
    """
    lhs, rhs = smooth_and_rotate(raw, operation, lhs, rhs, state)
    return lhs, sparsity.prune(rhs, raw.rhs, operation.axes("rhs"), "fwd.rhs")


def smooth_and_rotate(
    raw: config.DotGeneralRaw,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    state: Any = (),
) -> tuple[Operand, Operand]:
    """Smooths the operands of a forward contraction, then rotates them.

    Args:
        raw: config of the forward contraction.
        operation: the contraction.
        lhs: floating, or a `QTensor`, which has been prepared already.
        rhs: like `lhs`.
        state: state of a smoothing that gathers statistics.

    Raises:
        ValueError: if the contraction has no smoothing, or no rotation of such a size;
            or as in `smoothing.smooth`.
    """
    if raw.smoothing is not None:
        dims = smoothing.dims_of(operation)
        lhs, rhs = smoothing.smooth(raw, lhs, rhs, dims, state)
    tensors = raw.lhs, raw.rhs
    return rotation.rotate(raw.rotation, operation, lhs, rhs, tensors, "fwd")


def restored_rhs(
    raw: config.DotGeneralRaw,
    operation: Operation,
    lhs: jax.Array,
    rhs: jax.Array,
    state: Any,
    prepared: jax.Array,
) -> jax.Array:
    """Takes the smoothing and the rotation of `smooth_and_rotate` out of a rhs.

    Args:
        raw: config of the forward contraction.
        operation: the contraction.
        lhs: left operand, not prepared.
        rhs: right operand, not prepared.
        state: state of a smoothing that gathers statistics.
        prepared: the right operand, smoothed and rotated, and rounded since.

    Returns:
        What would be `prepared`, float32 at least.
    """
    wide = prepared.astype(jnp.promote_types(prepared.dtype, jnp.float32))

    def rotated(x: jax.Array) -> Any:
        tensors = raw.lhs, raw.rhs
        return rotation.rotate(raw.rotation, operation, lhs, x, tensors, "fwd")[1]

    # The inverse of an orthogonal map is its transpose.
    _, transposed = jax.vjp(rotated, wide)
    (out,) = transposed(wide)
    if raw.smoothing is not None:
        dims = smoothing.dims_of(operation)
        factor = smoothing.factors(raw.smoothing, lhs, rhs, dims, state).rhs
        out = out if factor is None else out / factor
    return out


def prepare_gradient(
    how: config.Hadamard | None,
    operation: Operation,
    g: Operand,
    other: Operand,
    tensors: tuple[config.Tensor, config.Tensor],
    path: str,
) -> tuple[Operand, Operand]:
    """Pads the operands of a gradient for blocks, then rotates them.

    Args:
        how: rotation of the gradient.
        operation: contraction that computes the gradient.
        g: gradient of the output.
        other: the other operand.
        tensors: configs of both.
        path: path of the contraction in its config.

    Raises:
        ValueError: if `other` is a `QTensor` and should be rotated; or as in `prepare`.
    """
    if any(tensor.blocks is not None for tensor in tensors):
        g, other = padding.pad_operands(operation, g, other, tensors, path)
    if how is not None and isinstance(other, QTensor):
        raise ValueError(
            f"{path}.rotation={how!r} rotates floats, but {path}.rhs is a QTensor of "
            f"shape {other.shape}, whose integers are given; leave {path}.rotation None"
        )
    return rotation.rotate(how, operation, g, other, tensors, path)

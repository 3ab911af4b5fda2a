"""Barriers around the scale of a quantized array."""

import dataclasses
from collections.abc import Callable

import jax

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.qtensor.qtensor import QTensor

Reciprocal = Callable[[jax.Array, float], jax.Array]
"""Function of a scale and the unit of its grid."""


def with_fusion_barrier(q: QTensor, tensor: config.Tensor) -> QTensor:
    """Keeps XLA from fusing the computation of the scale with its consumers."""
    if q.zero_point is not None:
        q = dataclasses.replace(q, zero_point=exact.fusion_barrier(q.zero_point))
    scale = exact.scale_barrier(q.scale, tensor.grid.unit)
    return dataclasses.replace(q, scale=scale)


def reciprocal_for(path: str) -> Reciprocal:
    """Returns how to find the reciprocal of an operand's scale.

    Args:
        path: path of the operand's config. The scales of a forward contraction are
            behind a barrier.
    """
    is_forward = path.startswith("fwd.")
    return exact.reciprocal_at_barrier if is_forward else exact.reciprocal

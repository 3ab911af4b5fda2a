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


def has_barrier(path: str, tensor: config.Tensor) -> bool:
    """Whether the scale of an operand of a contraction is behind a barrier.

    In a forward contraction, an operand that may be frozen is compiled alike, whether
    it is computed or given. Elsewhere, a barrier pays for scales that share a number:
    XLA:CPU would find each again, for every element that it scales.

    Args:
        path: path of the operand's config.
        tensor: config of the operand.
    """
    return path.startswith("fwd.") or tensor.has_relative_scales


def reciprocal_for(path: str, tensor: config.Tensor) -> Reciprocal:
    """Returns how to find the reciprocal of an operand's scale.

    The arguments are those of `has_barrier`.
    """
    if has_barrier(path, tensor):
        return exact.reciprocal_at_barrier
    return exact.reciprocal

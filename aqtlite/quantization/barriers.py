"""Barriers around the scale of a quantized array."""

import dataclasses
from collections.abc import Callable

import jax

from aqtlite import config
from aqtlite.lowering import fusion
from aqtlite.qtensor.qtensor import QTensor

FindReciprocal = Callable[[jax.Array, float], tuple[jax.Array, jax.Array]]
"""Function of a scale and its grid's unit, to the scale to read and its reciprocal."""


def with_fusion_barrier(q: QTensor, tensor: config.Tensor) -> QTensor:
    """Keeps XLA from fusing the scale and the zero point with their consumers."""
    if q.zero_point is not None:
        q = dataclasses.replace(q, zero_point=fusion.barrier(q.zero_point))
    scale, _ = fusion.behind_barrier(q.scale, tensor.grid.unit)
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


def reciprocal_for(path: str, tensor: config.Tensor) -> FindReciprocal:
    """Returns how to find the reciprocal of an operand's scale.

    The arguments are those of `has_barrier`.
    """
    if has_barrier(path, tensor):
        return fusion.behind_barrier
    return fusion.with_reciprocal


def reciprocal_of_given(path: str, tensor: config.Tensor) -> FindReciprocal:
    """Like `reciprocal_for`, for a given scale, which needs no barrier itself."""
    if has_barrier(path, tensor):
        return fusion.with_reciprocal_behind_barrier
    return fusion.with_reciprocal

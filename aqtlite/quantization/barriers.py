"""Barriers around the scale of a quantized array."""

import dataclasses

import numpy as np

from aqtlite import calibration, config
from aqtlite.lowering import exact
from aqtlite.qtensor.qtensor import QTensor


def with_fusion_barrier(q: QTensor) -> QTensor:
    """Keeps XLA from fusing the computation of the scale with its consumers."""
    if q.zero_point is not None:
        q = dataclasses.replace(q, zero_point=exact.fusion_barrier(q.zero_point))
    return dataclasses.replace(q, scale=exact.fusion_barrier(q.scale))


def with_scale_barrier(q: QTensor, tensor: config.Tensor) -> QTensor:
    """`with_fusion_barrier` for an operand, whose scale multiplies sums."""
    if q.zero_point is not None or not _is_of_maximum(tensor):
        return with_fusion_barrier(q)
    return dataclasses.replace(q, scale=exact.scale_barrier(q.scale))


def _is_of_maximum(tensor: config.Tensor) -> bool:
    """Whether scales are largest magnitudes times a constant.

    A kernel of its own finds these. LLVM sees of some other scales that they are
    positive (`exact.rounded_product`): of a constant one, or of a power of two.
    """
    is_plain = not tensor.po2_scale and tensor.scale_dtype in (None, np.float32)
    return is_plain and type(tensor.calibration) is calibration.AbsMax

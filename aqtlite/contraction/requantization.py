"""The quantized result of a contraction."""

from typing import Any

import jax

from aqtlite import config
from aqtlite.contraction import straight_through
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor

PATH = "out"


def quantize(
    out: jax.Array, tensor: config.Tensor, state: Any = ()
) -> jax.Array | QTensor:
    """Quantizes the result of a contraction by the config ``out``.

    Gradients pass the rounding unchanged (straight-through estimator): the gradient
    with respect to the returned `QTensor`, through `QTensor.dequant` or a contraction,
    becomes the gradient with respect to `out`, except where the grid's
    ``clip_gradient`` drops it.

    Args:
        out: result of the contraction, floating.
        tensor: config of the result; by default, elements share a scale along the last
            axis.
        state: statistics of a calibration that gathers them, or a `FixedScale` in their
            place.

    Returns:
        A `QTensor`; with ``use_fake_quant``, its dequantized array.
    """
    axes = OperandAxes.of_contracting(out.ndim, tuple(range(out.ndim))[-1:])
    q = straight_through.quantized(out, tensor, axes, PATH, state=state)
    return q.dequant() if tensor.use_fake_quant else q

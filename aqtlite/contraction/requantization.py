"""The quantized result of a contraction."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.contraction import poison, straight_through
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import quantizer
from aqtlite.quantization.fixed_scale import FixedScale

PATH = "out"


def left_float(cfg: config.DotGeneral) -> config.DotGeneral:
    """The config without the quantization of its result."""
    if not cfg.out.is_quantized:
        return cfg
    return dataclasses.replace(cfg, out=config.Tensor())


def quantize(
    out: jax.Array, tensor: config.Tensor, state: Any = ()
) -> jax.Array | QTensor:
    """Quantizes the result of a contraction as ``out`` says.

    Gradients pass the rounding unchanged (straight-through estimator): those with
    respect to the returned `QTensor`, of `QTensor.dequant` or of a contraction that
    takes it, are those with respect to `out`, except where the grid's
    ``clip_gradient`` drops them.

    Args:
        out: the result, floating.
        tensor: how; by default its last axis shares a scale.
        state: the statistics of a calibration that gathers them, or the `FixedScale` in
            their place.

    Returns:
        A `QTensor`; the array that it stands for, with ``use_fake_quant``.
    """
    axes = OperandAxes.of_contracting(out.ndim, tuple(range(out.ndim))[-1:])
    fixed = jax.lax.stop_gradient(out)
    q = quantizer.quantize_array(fixed, tensor, axes, PATH, state=state)
    if tensor.calibration.is_blind:
        q = poison.with_poisoned_scale(fixed, q, tensor, axes, PATH, state)
    # What contracts the integers reads scales as it reads those of operands.
    if not isinstance(state, FixedScale):
        q = quantizer.with_fusion_barrier(q)
    mask = straight_through.gradient_mask(fixed, q)
    unrounded = out if mask is None else jnp.where(mask, out, fixed)
    q = dataclasses.replace(q, unrounded=unrounded)
    return q.dequant() if tensor.use_fake_quant else q

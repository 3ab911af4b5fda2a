"""Configs of contractions of two activations, made from those of layers."""

import dataclasses
from typing import Literal

from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.tensor import Tensor


def for_activations(cfg: DotGeneral) -> DotGeneral:
    """Quantizes both operands as the config's lhs: as activations.

    In configs of layers, ``fwd.rhs`` is for weights: few bits, blocks that span several
    rows, statistics, sparsity and smoothing. A config that leaves ``fwd.lhs`` in float
    is returned as it is.

    >>> from aqtlite import config
    >>> config.for_activations(config.w4a8()).fwd.rhs
    Tensor(numerics=IntSymmetric(bits=8))

    Args:
        cfg: config of a layer.
    """
    lhs = cfg.fwd.lhs
    if not lhs.is_quantized or (lhs, None) == (cfg.fwd.rhs, cfg.fwd.smoothing):
        return cfg
    fwd = dataclasses.replace(cfg.fwd, rhs=lhs, smoothing=None)
    return dataclasses.replace(cfg, fwd=fwd)


def for_values(cfg: DotGeneral, side: Literal["lhs", "rhs"] = "rhs") -> DotGeneral:
    """Gives each position of the values of an attention a scale of its own.

    Probabilities times values contract positions. Per-channel scales of the values are
    shared by all of them: in causal attention, later positions change the results of
    earlier ones, and padding those of tokens. In the returned config, each position of
    the values has a scale, which multiplies the probabilities before these are
    quantized (``calib_shared_axes="remaining"``); the forward and both backward
    contractions remain contractions of integers. Values that have statistics, or axes
    of their own to share a scale, are left as configured. If the probabilities have
    statistics or learned scales, which do not know the scales of values, the values
    take the same calibration.

    Rules, and `AqtEinsum` in Flax's attention, call it where it is needed.

    >>> from aqtlite import config
    >>> config.for_values(config.qat(8)).fwd.rhs.calib_shared_axes
    'remaining'

    Args:
        cfg: config of probabilities times values.
        side: side of the values.

    Returns:
        A config without blocks along positions, without a rotation or a smoothing of
        them, and without scales relative to the largest one of the array.
    """
    other: Literal["lhs", "rhs"] = "rhs" if side == "lhs" else "lhs"
    values: Tensor = getattr(cfg.fwd, side)
    probabilities: Tensor = getattr(cfg.fwd, other)
    if not is_dynamic(values):
        return cfg
    if probabilities.gathers_statistics or probabilities.is_learned:
        values = dataclasses.replace(
            values,
            blocks=None,
            calibration=probabilities.calibration,
            calib_shared_axes=probabilities.calib_shared_axes,
        )
    else:
        probabilities = _by_itself(probabilities)
        values = dataclasses.replace(_by_itself(values), calib_shared_axes="remaining")
    fwd = dataclasses.replace(cfg.fwd, rotation=None, smoothing=None)
    if side == "rhs":
        fwd = dataclasses.replace(fwd, lhs=probabilities, rhs=values)
        drhs = _quantizing_anew(cfg.drhs, probabilities)
        return dataclasses.replace(cfg, fwd=fwd, drhs=drhs)
    fwd = dataclasses.replace(fwd, lhs=values, rhs=probabilities)
    dlhs = _quantizing_anew(cfg.dlhs, probabilities)
    return dataclasses.replace(cfg, fwd=fwd, dlhs=dlhs)


def _quantizing_anew(raw: DotGeneralRaw, probabilities: Tensor) -> DotGeneralRaw:
    """The gradient of values, in which a scale for each of their positions is found.

    Integers of the forward pass would be coarse where values are small beside others.
    """
    if not raw.rhs.use_fwd_quant:
        return raw
    rhs = dataclasses.replace(raw.rhs, use_fwd_quant=False)
    if raw.lhs.is_quantized and not rhs.is_quantized and probabilities.is_quantized:
        rhs = Tensor(
            numerics=probabilities.grid, use_fake_quant=probabilities.use_fake_quant
        )
    return dataclasses.replace(raw, rhs=rhs)


def is_dynamic(tensor: Tensor) -> bool:
    """Whether scales are found from the array, shared along the contracting axes.

    Blocks, of which several lie along a contracting axis, count.
    """
    return is_found(tensor) and tensor.calib_shared_axes is None


def is_found(tensor: Tensor) -> bool:
    """Whether scales are found from each array, not from batches or in training."""
    how = tensor.calibration
    is_known = how.needs_state or how.is_blind
    return tensor.is_quantized and not is_known


def _by_itself(tensor: Tensor) -> Tensor:
    """A config without blocks, and without scales relative to the largest one."""
    dtype = None if tensor.has_relative_scales else tensor.scale_dtype
    return dataclasses.replace(
        tensor, blocks=None, scale_dtype=dtype, scale_shared_axes=None
    )

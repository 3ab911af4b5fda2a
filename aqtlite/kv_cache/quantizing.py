"""The quantization of keys and values, in a cache or not: each position alone."""

import dataclasses

import jax

from aqtlite import config
from aqtlite.contraction import straight_through
from aqtlite.kv_cache import configs, rotation
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes


def quantize_keys(x: jax.Array, cfg: config.DotGeneral) -> QTensor:
    """Quantizes keys with one scale per position, head and group of channels.

    Returns:
        ``(*batch, length, heads, depth)``, or ``(*batch, length, heads * groups, depth
        // groups)``.
    """
    x, dtype = _prepared(x, cfg), x.dtype
    axes = OperandAxes.of_contracting(x.ndim, (x.ndim - 1,))
    tensor = configs.of_sums(cfg).fwd.rhs
    q = straight_through.quantized(x, tensor, axes, "fwd.rhs").astype(dtype)
    return dataclasses.replace(q, rotation=cfg.fwd.rotation)


def quantize_values(x: jax.Array, cfg: config.DotGeneral) -> QTensor:
    """Quantizes values as attention in training does (`config.for_values`).

    Returns:
        As `quantize_keys`.
    """
    x, dtype = _prepared(x, cfg), x.dtype
    tensor = configs.of_sums(cfg).fwd.rhs
    tensor = dataclasses.replace(tensor, calib_shared_axes="remaining")
    *batch, length, heads, depth = range(x.ndim)
    axes = OperandAxes((length,), (*batch, heads), (depth,))
    q = straight_through.quantized(x, tensor, axes, "fwd.rhs").astype(dtype)
    return dataclasses.replace(q, rotation=cfg.fwd.rotation)


def _prepared(x: jax.Array, cfg: config.DotGeneral) -> jax.Array:
    """Rotates the channels of heads, and makes groups of channels heads."""
    x = rotation.rotated(x, cfg.fwd.rotation)
    blocks = cfg.fwd.rhs.blocks
    groups = 1 if blocks is None else blocks.count_of(x.shape[-1])
    if groups == 1:
        return x
    in_groups = block_shapes.split_axis(x, x.ndim - 1, groups)
    return block_shapes.merge_with_next(in_groups, x.ndim - 2)

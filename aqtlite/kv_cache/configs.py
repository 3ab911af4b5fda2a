"""Configs of attention to a KV cache."""

import dataclasses
from typing import Any

from aqtlite import config, errors, numerics


def config_for(bits: int = 8) -> config.DotGeneral:
    """Returns a cache's config: keys and values of `bits` bits, all else of 8.

    Below 8 bits, queries, keys and values are rotated (`config.Hadamard`), so that
    channels with outliers do not make the others coarse.

    >>> cfg = config_for(4)
    >>> cfg.fwd.rhs.numerics.bits, cfg.fwd.lhs.numerics.bits, cfg.fwd.rotation
    (4, 8, Hadamard())

    Args:
        bits: width of keys and values. 2 to 4 bits are packed into bytes.

    Raises:
        TypeError: if `bits` is not an int.
        ValueError: if `bits` is out of the range of `numerics.IntSymmetric`.
    """
    changes: dict[str, Any] = {"fwd.rhs.numerics": numerics.IntSymmetric(bits=bits)}
    if bits < 8:
        changes["fwd.rotation"] = config.Hadamard()
    return config.update(config.qat(8), changes)


def check_config(cfg: config.DotGeneral) -> None:
    """Checks that a cache can be quantized by ``cfg.fwd.rhs``.

    Args:
        cfg: config of both contractions, in which queries and probabilities are lhs.

    Raises:
        TypeError: if it is not a `config.DotGeneral`.
        ValueError: if it cannot quantize a cache.
    """
    if not isinstance(cfg, config.DotGeneral):
        raise TypeError(
            f"a KV cache takes a config.DotGeneral, got {errors.brief(cfg)}; "
            "aqtlite.kv_cache.config_for(8) makes one"
        )
    tensor = cfg.fwd.rhs
    if not tensor.is_quantized or tensor.use_fake_quant:
        raise ValueError(
            "fwd.rhs is what keys and values are quantized by, and "
            f"{tensor!r} leaves them in float; give it numerics, as "
            "config.qat(8) and config.weight_only(8) do"
        )
    if tensor.calib_shared_axes is not None:
        raise ValueError(
            "a KV cache has scales for each position and head; leave "
            f"fwd.rhs.calib_shared_axes={tensor.calib_shared_axes!r} None"
        )
    if tensor.has_relative_scales:
        raise ValueError(
            f"fwd.rhs.scale_dtype={str(tensor.scale_dtype)!r} rounds scales relative "
            "to the largest one, and a KV cache writes each position alone; take "
            "'bfloat16' or 'float8_e8m0fnu', or None"
        )
    blocks = tensor.blocks
    if blocks is not None and (blocks.pad or blocks.remaining_size != 1):
        raise ValueError(
            f"fwd.rhs.blocks={blocks!r}: a KV cache has scales for groups of channels "
            "that divide a head, at each position; set size or count, and perhaps fit"
        )
    for side, one in (("lhs", cfg.fwd.lhs), ("rhs", tensor)):
        if one.calibration.needs_state:
            raise ValueError(
                f"fwd.{side}.calibration={one.calibration!r} needs statistics or "
                "parameters, which a KV cache does not keep; take one that looks at "
                "the array alone, such as calibration.AbsMax()"
            )
    if cfg.out.is_quantized:
        raise ValueError(
            f"out={cfg.out!r} would quantize the scores of attention; leave it float"
        )
    if cfg.fwd.smoothing is not None:
        raise ValueError(
            f"fwd.smoothing={cfg.fwd.smoothing!r} moves scales between keys and "
            "queries, of which a KV cache has the past keys in integers; leave it None"
        )
    for name in ("sparsity", "rounding", "double_scales"):
        value = getattr(tensor, name)
        if value is not None:
            raise ValueError(
                f"fwd.rhs.{name}={value!r} is of weights, and keys and values are "
                "none; leave it None"
            )


def of_sums(cfg: config.DotGeneral) -> config.DotGeneral:
    """The config of the contractions, of what is rotated and grouped already."""
    cfg = cfg.for_serving()
    rhs = dataclasses.replace(cfg.fwd.rhs, blocks=None)
    fwd = dataclasses.replace(cfg.fwd, rhs=rhs, rotation=None)
    return dataclasses.replace(cfg, fwd=fwd)

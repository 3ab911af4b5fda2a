"""NVIDIA ModelOpt: FP8 by tensor, row and block, NVFP4 and MXFP8.

Scales multiply: ``W = E2M1 * (weight_scale * weight_scale_2)`` in NVFP4, low nibble
first, and ``W = weight * weight_scale`` in FP8.
"""

import fnmatch
import functools
from collections.abc import Mapping

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits, fp8
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.qtensor.qtensor import QTensor

_NVFP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")
_MIXED = "MIXED_PRECISION"
_BLOCK = 128


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the weights of a checkpoint.

    Raises:
        CheckpointError: if the config or the shapes are not of this format.
    """
    found = settings.inner("quantization") or settings
    found.one_of("quant_algo", (*_NVFP4, *_FP8, _MIXED))
    excluded = found.strings("exclude_modules", "ignore")
    plans = {}
    for module in base.suffixed(tensors, ".weight_scale"):
        if any(fnmatch.fnmatchcase(module, one) for one in excluded):
            raise CheckpointError(
                f"{module} is quantized, and exclude_modules of the config says that "
                "it is not"
            )
        algorithm, group = _algorithm_of(module, found)
        plan_module = _plan_fp4 if algorithm in _NVFP4 else _plan_fp8
        plans[f"{module}.weight"] = plan_module(tensors, module, algorithm, group)
    return plans


def _algorithm_of(module: str, settings: Settings) -> tuple[str, int]:
    """The algorithm of a module, and the size of its groups."""
    found = settings
    if settings.values["quant_algo"] == _MIXED:
        layers = settings.inner("quantized_layers")
        one = None if layers is None else layers.inner(module)
        if one is None:
            raise CheckpointError(
                f"{module} is quantized, and quantized_layers of the config lacks it"
            )
        found = one
    algorithm = found.one_of("quant_algo", (*_NVFP4, *_FP8))
    default = 32 if algorithm == "MXFP8" else 16
    return algorithm, found.integer("group_size", 1, default)


def _plan_fp8(
    tensors: base.Tensors, module: str, algorithm: str, group: int
) -> base.Weight:
    name, scale = f"{module}.weight", f"{module}.weight_scale"
    if algorithm == "FP8":
        return fp8.plan_scaled(tensors, name, scale, None)
    if algorithm == "FP8_PB_WO":
        return fp8.plan_scaled(tensors, name, scale, (_BLOCK, _BLOCK))
    info = base.require(tensors, name, [base.E4M3])
    if algorithm == "MXFP8":
        base.require(tensors, scale, base.EXPONENTS)
        return fp8.plan_scaled(tensors, name, scale, (1, group))
    rows = info.shape[:-1]
    return fp8.plan_scaled(tensors, name, scale, None, [rows, (*rows, 1)])


def _plan_fp4(
    tensors: base.Tensors, module: str, algorithm: str, group: int
) -> base.Weight:
    names = [
        f"{module}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")
    ]
    packed = base.require(tensors, names[0], [base.UINT8])
    if len(packed.shape) < 2:
        raise CheckpointError(f"{names[0]} is {packed}, not a matrix")
    *rows, half = packed.shape
    shape = (*rows, 2 * half)
    scales = (*rows, base.blocks(2 * half, group))
    base.require(tensors, names[1], [base.E4M3], [scales])
    # Stacked experts have a second scale each.
    tops = [(), (1,), *([(rows[0],), (rows[0], 1, 1)] if len(rows) > 1 else [])]
    base.require(tensors, names[2], [np.dtype("float32")], tops)
    awq = ", inputs times pre_quant_scale" if algorithm == "NVFP4_AWQ" else ""
    return base.weight(
        tensors,
        names,
        shape,
        f"nvfp4, blocks of 1 x {group}{awq}",
        functools.partial(_read_fp4, tensors, names, group),
    )


def _read_fp4(tensors: base.Tensors, names: list[str], group: int) -> QTensor:
    nibbles = bits.nibbles(tensors.read(names[0]))
    values = bits.e2m1_without_minus_zero(nibbles)
    inner, outer = (base.checked_scale(n, tensors.read(n)) for n in names[1:])
    # One for all, or one for each expert.
    product = inner * outer.reshape(-1, *(1,) * (inner.ndim - 1))
    scale = base.checked_scale(names[1], product)
    scale = base.even(scale, -1, group, values.shape[-1])
    return base.on_grid(values, scale, bits.E2M1)

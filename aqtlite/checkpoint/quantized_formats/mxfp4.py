"""MXFP4: the experts of gpt-oss, in the files of Hugging Face and of OpenAI.

Blocks of 32 inputs share a power of two: ``W = E2M1[nibble] * 2^(scale - 127)``, low
nibble first.
"""

import functools
from collections.abc import Mapping

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.qtensor.qtensor import QTensor


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the experts of a checkpoint.

    With the names of Hugging Face (``_blocks``) they are (experts, inputs, outputs), as
    in its model; with OpenAI's (``.blocks``), (experts, outputs, inputs).

    Raises:
        CheckpointError: if dtypes or shapes are not of this format.
    """
    in_float = settings.strings("modules_to_not_convert")
    plans = {}
    for separator in ("_", "."):
        for name in base.suffixed(tensors, f"{separator}blocks"):
            base.check_not_listed(name, in_float, "modules_to_not_convert")
            plans[name] = _plan_expert(tensors, name, separator)
    return plans


def _plan_expert(tensors: base.Tensors, name: str, separator: str) -> base.Weight:
    blocks, scales = f"{name}{separator}blocks", f"{name}{separator}scales"
    info = base.require(tensors, blocks, [base.UINT8])
    if len(info.shape) < 3 or info.shape[-1] != 16:
        raise CheckpointError(f"{blocks} is {info}, not blocks of 16 bytes")
    base.require(tensors, scales, base.EXPONENTS, [info.shape[:-1]])
    *leading, rows, count, _ = info.shape
    columns = 32 * count
    is_transposed = separator == "_"
    last = (columns, rows) if is_transposed else (rows, columns)
    return base.weight(
        tensors,
        (blocks, scales),
        (*leading, *last),
        f"mxfp4, blocks of {'32 x 1' if is_transposed else '1 x 32'}",
        functools.partial(_read, tensors, blocks, scales, is_transposed),
    )


def _read(
    tensors: base.Tensors, blocks: str, scales: str, is_transposed: bool
) -> QTensor:
    packed = tensors.read(blocks)
    *leading, count, size = packed.shape
    values = bits.e2m1(bits.nibbles(packed.reshape(*leading, count * size)))
    scale = base.powers_of_two(scales, tensors.read(scales))
    if is_transposed:
        values, scale = np.swapaxes(values, -1, -2), np.swapaxes(scale, -1, -2)
    return base.on_grid(values, scale, bits.E2M1)

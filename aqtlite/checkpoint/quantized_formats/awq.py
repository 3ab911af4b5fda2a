"""AWQ: files of AutoAWQ in its GEMM layout, 4 bits with zero points.

``W[n, k] = scales[k // g, n] * (code[k, n] - zero[k // g, n])``. Codes and zero points
are packed along the outputs n, eight to a word, in an interleaved order.
"""

import functools
from collections.abc import Mapping

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.qtensor.qtensor import QTensor

_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The nibble of a word, from the lowest, that holds each of eight outputs."""


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the weights of a checkpoint, (outputs, inputs) as in PyTorch.

    Raises:
        CheckpointError: if the config or the shapes are not of this format.
    """
    # AutoAWQ's own file has other names than the config of Hugging Face.
    version = settings.values.get("version")
    if isinstance(version, str) and version.lower() != "gemm":
        raise CheckpointError(
            f"{settings.where}: the layout version={version!r} of AWQ is not read; "
            "only gemm is"
        )
    key = "bits" if "bits" in settings.values else "w_bit"
    settings.one_of(key, (4,))
    settings.one_of("zero_point", (True,), True)
    name = "group_size" if "group_size" in settings.values else "q_group_size"
    group = None if settings.values.get(name) == -1 else settings.integer(name, 1)
    in_float = settings.strings("modules_to_not_convert")
    plans = {}
    for module in base.suffixed(tensors, ".qweight"):
        base.check_not_listed(module, in_float, "modules_to_not_convert")
        plans[f"{module}.weight"] = _plan_module(tensors, module, group)
    return plans


def _plan_module(tensors: base.Tensors, module: str, group: int | None) -> base.Weight:
    packed = base.require(tensors, f"{module}.qweight", [base.INT32])
    if len(packed.shape) != 2:
        raise CheckpointError(f"{module}.qweight is {packed}, not a matrix")
    inputs, outputs = packed.shape[0], packed.shape[1] * 8
    group = min(group or inputs, inputs) or 1
    groups = base.blocks(inputs, group)
    base.require(tensors, f"{module}.scales", base.FLOATS, [(groups, outputs)])
    zeros = (groups, packed.shape[1])
    base.require(tensors, f"{module}.qzeros", [base.INT32], [zeros])
    return base.weight(
        tensors,
        [f"{module}.{name}" for name in ("qweight", "scales", "qzeros")],
        (outputs, inputs),
        f"int4, blocks of 1 x {group}, zero points",
        functools.partial(_read, tensors, module, group, inputs),
    )


def _read(tensors: base.Tensors, module: str, group: int, inputs: int) -> QTensor:
    codes, zeros = (
        _unpacked(tensors.read(f"{module}.{name}")) for name in ("qweight", "qzeros")
    )
    scale = base.checked_scale(f"{module}.scales", tensors.read(f"{module}.scales"))
    scale, zeros = (base.even(x, 0, group, inputs) for x in (scale, zeros))
    return base.integers(codes.T, 4, scale.T, zeros.T)


def _unpacked(words: np.ndarray) -> np.ndarray:
    rows, count = words.shape
    nibbles = bits.from_words(words, 4, 8 * count).reshape(rows, count, 8)
    return nibbles[..., _ORDER].reshape(rows, 8 * count)

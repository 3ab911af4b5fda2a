"""GPTQ: files of AutoGPTQ and GPTQModel, with 2, 3, 4 and 8 bits.

``W[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])``, with codes packed
along the inputs k and zero points along the outputs n, each as one stream of bits.
"""

import functools
from collections.abc import Mapping

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.qtensor.qtensor import QTensor


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the weights of a checkpoint, (outputs, inputs) as in PyTorch.

    Raises:
        CheckpointError: if the config or the shapes are not of this format.
    """
    layout = _Layout(settings)
    return {
        f"{module}.weight": _plan_module(tensors, module, layout)
        for module in base.suffixed(tensors, ".qweight")
    }


class _Layout:
    """The fields of the config."""

    def __init__(self, settings: Settings):
        self.bits = settings.one_of("bits", (2, 3, 4, 8))
        group = settings.values.get("group_size", -1)
        self.group = None if group == -1 else settings.integer("group_size", 1)
        self.is_symmetric = settings.flag("sym", default=False)
        self.in_order = not settings.flag("desc_act", default=False)
        is_old = settings.values.get("checkpoint_format") is None
        key = "format" if is_old else "checkpoint_format"
        version = settings.one_of(key, ("gptq", "gptq_v2"), "gptq")
        self.zero_offset = 1 if version == "gptq" else 0
        self.in_float = settings.strings("modules_in_block_to_not_quantize")
        dynamic = settings.inner("dynamic")
        patterns = () if dynamic is None else tuple(dynamic.values)
        self.left_out = tuple(key.removeprefix("-:") for key in patterns)
        if not all(key.startswith("-:") for key in patterns):
            raise CheckpointError(
                f"{settings.where}: dynamic gives modules other widths, which is not "
                "read; quantize all modules alike"
            )


def _plan_module(tensors: base.Tensors, module: str, layout: _Layout) -> base.Weight:
    width = layout.bits
    packed = base.require(tensors, f"{module}.qweight", [base.INT32])
    if len(packed.shape) != 2:
        raise CheckpointError(f"{module}.qweight is {packed}, not a matrix")
    outputs = packed.shape[1]
    inputs = _inputs(tensors, module, packed.shape[0], width)
    group = max(min(layout.group or inputs, inputs), 1)
    groups = base.blocks(inputs, group)
    base.require(tensors, f"{module}.scales", base.FLOATS, [(groups, outputs)])
    zeros = (groups, bits.words_of(outputs, width))
    base.require(tensors, f"{module}.qzeros", [base.INT32], [zeros])
    used = [f"{module}.{name}" for name in ("qweight", "scales", "qzeros")]
    if f"{module}.g_idx" in tensors.infos:
        used.append(f"{module}.g_idx")
    elif not layout.in_order:
        raise CheckpointError(f"{module} has no g_idx, which desc_act asks for")
    base.check_not_listed(module, layout.in_float, "modules_in_block_to_not_quantize")
    if any(base.matches(pattern, module) for pattern in layout.left_out):
        raise base.kept_in_float(module, "dynamic")
    zero_points = "" if layout.is_symmetric else ", zero points"
    order = "" if layout.in_order else ", groups in the order of g_idx"
    return base.weight(
        tensors,
        used,
        (outputs, inputs),
        f"int{width}, blocks of 1 x {group}{zero_points}{order}",
        functools.partial(_read, tensors, module, layout, (outputs, inputs), group),
    )


def _inputs(tensors: base.Tensors, module: str, words: int, width: int) -> int:
    """The number of inputs: that of g_idx, or as many as the words hold."""
    inputs = words * 32 // width
    if f"{module}.g_idx" not in tensors.infos:
        return inputs
    index = base.require(tensors, f"{module}.g_idx", [base.INT32])
    if len(index.shape) != 1 or bits.words_of(index.shape[0], width) != words:
        raise CheckpointError(
            f"{module}.g_idx is {index}, and {words} words of qweight hold {inputs} "
            f"codes of {width} bits"
        )
    return index.shape[0]


def _read(
    tensors: base.Tensors,
    module: str,
    layout: _Layout,
    shape: tuple[int, int],
    group: int,
) -> QTensor:
    outputs, inputs = shape
    width = layout.bits
    words = tensors.read(f"{module}.qweight")
    codes = bits.from_words(np.ascontiguousarray(words.T), width, inputs)
    scale = base.checked_scale(f"{module}.scales", tensors.read(f"{module}.scales")).T
    stored = bits.from_words(tensors.read(f"{module}.qzeros"), width, outputs).T
    zero = (stored + np.uint8(layout.zero_offset)) & np.uint8(2**width - 1)
    in_order = np.arange(inputs, dtype=np.int32) // group
    index = in_order
    if f"{module}.g_idx" in tensors.infos:
        index = tensors.read(f"{module}.g_idx")
    if not np.array_equal(index, in_order):
        if layout.in_order:
            raise CheckpointError(
                f"{module}.g_idx is not in the order of the inputs, and desc_act of "
                "the config says that it is"
            )
        if index.size and not 0 <= index.min() <= index.max() < scale.shape[1]:
            raise CheckpointError(
                f"{module}.g_idx names groups outside 0 to {scale.shape[1] - 1}"
            )
        # Groups of scattered inputs are no blocks: each input has its scale.
        scale, zero = scale[:, index], zero[:, index]
    else:
        scale, zero = (base.even(x, 1, group, inputs) for x in (scale, zero))
    if not layout.is_symmetric:
        return base.integers(codes, width, scale, zero)
    middle = 2 ** (width - 1)
    if (zero != middle).any():
        raise CheckpointError(
            f"{module}.qzeros are not {middle - layout.zero_offset}, as sym and "
            f"checkpoint_format of the config ask for: one of the three is wrong"
        )
    signed = (codes ^ np.uint8(middle)).view(np.int8)
    return base.integers(_extended(signed, width), width, scale)


def _extended(values: np.ndarray, width: int) -> np.ndarray:
    """Extends the sign of the lowest `width` bits."""
    shift = np.int8(8 - width)
    return (values << shift) >> shift

"""Tensors that are a part of a quantized weight, told by name, dtype and shape."""

from collections.abc import Collection

from aqtlite.checkpoint.arrays import ArrayInfo

_PARTS = (
    *("qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_shape"),
    *("weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
    *("weight_g_idx", "absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *("SCB", "W_q"),
)
"""Last steps of names."""

_ENDS = tuple(
    f"_{part}"
    for part in _PARTS
    if part.startswith("weight_") or part in ("qweight", "qzeros")
)
"""Ends of the last step: experts that are one tensor have no ``.weight``."""

_SCALES = ("scale_inv", "weight_scale", "weight_scale_2", "scale", "scales")
_PLAIN = ("float16", "bfloat16", "float32", "float64")
_BYTES = ("int8", "uint8")
_MASKS = ("bias", "mask")
"""Ends of names of bytes that are masks, as GPT-2's."""


def is_part(
    name: str, info: ArrayInfo, names: Collection[str], *, has_config: bool
) -> bool:
    """Whether a tensor by itself means nothing: codes, their scales or zero points.

    Args:
        name: its name.
        info: its shape and dtype.
        names: names of all tensors beside it.
        has_config: whether a config says that weights are quantized.
    """
    last = name.rpartition(".")[2]
    if ".quant_state.bitsandbytes__" in name or last in _PARTS:
        return True
    if last.endswith("_scale_inv") or (has_config and last.endswith(_ENDS)):
        return True
    kind = info.dtype.name
    if last == "weight" and kind not in _PLAIN:
        return True
    if len(info.shape) < 2 or last.endswith(_MASKS):
        return False
    if kind in _BYTES:
        return has_config or any(f"{name}_{scale}" in names for scale in _SCALES)
    return kind.startswith("float8")

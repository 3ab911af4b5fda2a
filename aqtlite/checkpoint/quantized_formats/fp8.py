"""FP8 in blocks, as DeepSeek and Hugging Face write it.

``W[n, k] = weight[n, k] * weight_scale_inv[n // rows, k // columns]``. In spite of its
name, the scale multiplies. The last block of an axis may be smaller.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.numerics import Float
from aqtlite.qtensor.qtensor import QTensor

GRID = Float.from_dtype("float8_e4m3fn")


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the weights of a checkpoint.

    Raises:
        CheckpointError: if the config or the shapes are not of this format.
    """
    settings.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = block_size(settings, "weight_block_size")
    in_float = settings.strings("modules_to_not_convert", "ignored_layers")
    plans = {}
    for name in base.suffixed(tensors, "_scale_inv"):
        plans[name] = plan_scaled(tensors, name, f"{name}_scale_inv", block)
    # With one scale, as vLLM's first files have it.
    for module in base.suffixed(tensors, ".weight_scale"):
        name = f"{module}.weight"
        plans[name] = plan_scaled(tensors, name, f"{name}_scale", None)
    for name in plans:
        module = name.removesuffix(".weight")
        base.check_not_listed(module, in_float, "modules_to_not_convert")
    return plans


def block_size(settings: Settings, key: str) -> tuple[int, int] | None:
    """Reads the rows and columns of a block; None for one scale."""
    value = settings.values.get(key)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(x) is int and x > 0 for x in value):
        raise settings.wrong(key, "two positive integers")
    return value[0], value[1]


def plan_scaled(
    tensors: base.Tensors,
    name: str,
    scale_name: str,
    block: tuple[int, int] | None,
    shapes: Sequence[tuple[int, ...]] = (),
) -> base.Weight:
    """Plans an fp8 weight that its scales multiply.

    Args:
        tensors: the checkpoint.
        name: name of the weight.
        scale_name: name of its scales.
        block: rows and columns of a block; None for one scale.
        shapes: further shapes of scales that are allowed.
    """
    info = base.require(tensors, name, [base.E4M3])
    if len(info.shape) < 2:
        raise CheckpointError(f"{name} is {info}, not a matrix")
    *leading, rows, columns = info.shape
    allowed = list(shapes)
    if block is None:
        allowed += [(), (1,), (1,) * len(info.shape)]
    else:
        counts = base.blocks(rows, block[0]), base.blocks(columns, block[1])
        allowed.append((*leading, *counts))
    dtypes = [*base.FLOATS, *base.EXPONENTS]
    scale = base.require(tensors, scale_name, dtypes, allowed)
    spread = block or (rows, columns)
    return base.weight(
        tensors,
        (name, scale_name),
        info.shape,
        f"fp8_e4m3, {_text(info.shape, scale.shape, block)}",
        functools.partial(_read, tensors, name, scale_name, spread),
    )


def _text(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> str:
    if block is not None and len(scale) == len(shape):
        return f"blocks of {block[0]} x {block[1]}"
    if len(scale) < 2:
        scale = (*scale, *(1,) * (len(shape) - len(scale)))
    return base.block_text(shape, scale)


def _read(
    tensors: base.Tensors, name: str, scale_name: str, block: tuple[int, int]
) -> QTensor:
    values = tensors.read(name)
    stored = tensors.read(scale_name)
    if stored.dtype in base.EXPONENTS:
        scale = base.powers_of_two(scale_name, stored)
    else:
        scale = base.checked_scale(scale_name, stored)
    scale = keepdims(scale, values.ndim)
    for axis, size in zip((-2, -1), block, strict=True):
        scale = base.even(scale, axis, size, values.shape[axis])
    return base.on_grid(values, scale, GRID)


def keepdims(scale: np.ndarray, ndim: int) -> np.ndarray:
    """Appends axes of size 1 to one scale, or to scales of rows."""
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))

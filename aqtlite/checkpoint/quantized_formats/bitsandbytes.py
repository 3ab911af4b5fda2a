"""bitsandbytes: nf4 and fp4 in blocks, with or without nested scales, and int8.

In 4 bits, the weight is one row of codes, the high nibble first, in blocks that share
a scale: ``W = quant_map[code] * absmax[i // blocksize]``. Nested scales are themselves
codes: ``absmax = nested_quant_map[code] * nested_absmax[i // 256] + nested_offset``.
In 8 bits, ``W = weight * (SCB / 127)``.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits
from aqtlite.checkpoint.quantized_formats.codebook import Codebook
from aqtlite.checkpoint.quantized_formats.settings import Settings, parse_json
from aqtlite.numerics import NormalFloat, Numerics
from aqtlite.qtensor.qtensor import QTensor

_STATE = ".quant_state.bitsandbytes__"
_FLOAT32 = np.dtype("float32")
_STORAGE = (base.UINT8, *base.FLOATS)
_INVERSE_OF_127 = np.float32(7.874015718698502e-3)
_LARGEST_STATE = 1 << 16
_LARGEST_OFFSET = 1e38


@dataclasses.dataclass(frozen=True)
class _State:
    """How a weight of 4 bits is stored: JSON in a tensor of bytes."""

    shape: tuple[int, ...]
    kind: str
    block: int
    nested_block: int | None
    nested_offset: float


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the weights of a checkpoint.

    Raises:
        CheckpointError: if dtypes, shapes or states are not of this format.
    """
    in_float = settings.strings("llm_int8_skip_modules")
    plans = {}
    for kind in ("nf4", "fp4"):
        for name in base.suffixed(tensors, f"{_STATE}{kind}"):
            plans[name] = _plan_4_bits(tensors, name, kind)
    for module in base.suffixed(tensors, ".SCB"):
        plans[f"{module}.weight"] = _plan_8_bits(tensors, module)
    for name in plans:
        module = name.removesuffix(".weight")
        base.check_not_listed(module, in_float, "llm_int8_skip_modules")
    return plans


def _plan_4_bits(tensors: base.Tensors, name: str, kind: str) -> base.Weight:
    state = _state(tensors, f"{name}{_STATE}{kind}", kind)
    size = math.prod(state.shape)
    count = base.blocks(size, state.block)
    packed = base.require(tensors, name, _STORAGE)
    if packed.nbytes != base.blocks(size, 2):
        raise CheckpointError(
            f"{name} is {packed}, which is not 4 bits for each element of the shape "
            f"{list(state.shape)}"
        )
    used = [name, f"{name}.absmax", f"{name}.quant_map", f"{name}{_STATE}{kind}"]
    base.require(tensors, used[2], [_FLOAT32], [(16,)])
    if state.nested_block is None:
        base.require(tensors, used[1], [_FLOAT32], [(count,)])
    else:
        base.require(tensors, used[1], [base.UINT8], [(count,)])
        nested = f"{name}.nested_absmax", f"{name}.nested_quant_map"
        counts = base.blocks(count, state.nested_block)
        base.require(tensors, nested[0], [_FLOAT32], [(counts,)])
        base.require(tensors, nested[1], [_FLOAT32], [(256,)])
        used += nested
    inner = "" if state.nested_block is None else ", nested scales"
    return base.weight(
        tensors,
        used,
        state.shape,
        f"{kind}, blocks of {state.block}{inner}",
        functools.partial(_read_4_bits, tensors, name, state),
    )


def _state(tensors: base.Tensors, name: str, kind: str) -> _State:
    info = base.require(tensors, name, [base.UINT8])
    if info.nbytes > _LARGEST_STATE:
        raise CheckpointError(f"{name} is {info}, which is no state of a weight")
    settings = Settings(parse_json(tensors.read(name).tobytes(), name), name)
    settings.one_of("quant_type", (kind,))
    shape = settings.values.get("shape")
    is_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not is_shape or not shape:
        raise settings.wrong("shape", "a list of positive integers")
    nested = None
    offset = 0.0
    if f"{name.partition(_STATE)[0]}.nested_absmax" in tensors.infos:
        nested = settings.integer("nested_blocksize", 1)
        settings.one_of("nested_dtype", ("float32",))
        given = settings.values.get("nested_offset")
        if not isinstance(given, int | float) or not abs(given) < _LARGEST_OFFSET:
            raise settings.wrong("nested_offset", "a finite number")
        offset = float(given)
    return _State(tuple(shape), kind, settings.integer("blocksize", 1), nested, offset)


def _read_4_bits(tensors: base.Tensors, name: str, state: _State) -> QTensor:
    size, columns = math.prod(state.shape), state.shape[-1]
    packed = np.ascontiguousarray(tensors.read(name)).reshape(-1).view(np.uint8)
    swapped = (packed << 4) | (packed >> 4)  # The high nibble comes first.
    codes = bits.nibbles(swapped)[:size]
    codes = codes.astype(jnp.dtype("uint4")).reshape(state.shape)
    # Blocks run over the ends of rows; parts of them that stay within a row have equal
    # sizes, and each lies in one block.
    part = math.gcd(state.block, columns)
    block_of = np.arange(size // part) * part // min(state.block, size)
    scale = _absmax(tensors, name, state)[block_of]
    scale = scale.reshape(*state.shape[:-1], columns // part)
    return base.on_grid(codes, scale, _grid(tensors, name))


def _absmax(tensors: base.Tensors, name: str, state: _State) -> np.ndarray:
    stored = tensors.read(f"{name}.absmax")
    if state.nested_block is None:
        return base.checked_scale(f"{name}.absmax", stored)
    values = tensors.read(f"{name}.nested_quant_map")[stored]
    outer = tensors.read(f"{name}.nested_absmax")
    block = min(state.nested_block, values.size)
    of_each = outer[np.arange(values.size) // block]
    absmax = values * of_each + np.float32(state.nested_offset)
    return base.checked_scale(f"{name}.nested_absmax", absmax, signed=True)


def _grid(tensors: base.Tensors, name: str) -> Numerics:
    values = tensors.read(f"{name}.quant_map")
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}.quant_map holds NaN or infinity")
    nf4 = NormalFloat()
    codes = np.arange(16).astype(nf4.storage_dtype)
    if np.array_equal(values, np.asarray(nf4.decode(jnp.asarray(codes)))):
        return nf4
    return Codebook(values=tuple(values.tolist()))


def _plan_8_bits(tensors: base.Tensors, module: str) -> base.Weight:
    used = [f"{module}.weight", f"{module}.SCB"]
    info = base.require(tensors, used[0], [base.INT8])
    if len(info.shape) != 2:
        raise CheckpointError(f"{used[0]} is {info}, not a matrix")
    base.require(tensors, used[1], [_FLOAT32], [info.shape[:1]])
    if f"{module}.weight_format" in tensors.infos:
        used.append(f"{module}.weight_format")
        base.require(tensors, used[2], [base.UINT8], [(), (1,)])
    return base.weight(
        tensors,
        used,
        info.shape,
        f"int8, blocks of 1 x {info.shape[1]}",
        functools.partial(_read_8_bits, tensors, module),
    )


def _read_8_bits(tensors: base.Tensors, module: str) -> QTensor:
    layout = f"{module}.weight_format"
    if layout in tensors.infos and tensors.read(layout).any():
        raise CheckpointError(f"{layout} is not 0, the layout of rows")
    largest = base.checked_scale(f"{module}.SCB", tensors.read(f"{module}.SCB"))
    scale = (largest * _INVERSE_OF_127)[:, None]
    return base.integers(tensors.read(f"{module}.weight"), 8, scale)

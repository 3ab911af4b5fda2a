"""compressed-tensors: files of llm-compressor.

``W = scale * (value - zero)``. Packed integers are stored with 2^(bits - 1) added, as
one stream of bits along the inputs; NVFP4's scales are divided by a global scale.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits, fp8
from aqtlite.checkpoint.quantized_formats.compressed_packing import (
    Packing,
    fitting,
    packing_of,
)
from aqtlite.checkpoint.quantized_formats.compressed_schemes import (
    Scheme,
    is_ignored,
    scheme_of,
    schemes_of,
)
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.qtensor.qtensor import QTensor


def plan(tensors: base.Tensors, settings: Settings) -> Mapping[str, base.Weight]:
    """Plans the weights of a checkpoint.

    Raises:
        CheckpointError: if the config or the shapes are not of this format.
    """
    status = settings.values.get("quantization_status")
    if status not in (None, "compressed", "frozen"):
        raise CheckpointError(
            f"{settings.where}: quantization_status={status!r} is no finished file"
        )
    sparsity = settings.inner("sparsity_config")
    if sparsity is not None and sparsity.values.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"{settings.where}: sparse files ({sparsity.values['format']!r}) are not "
            "read"
        )
    schemes = schemes_of(settings)
    ignored = settings.strings("ignore")
    plans = {}
    for module in _modules(tensors):
        if is_ignored(module, ignored):
            raise base.kept_in_float(module, "ignore")
        scheme = scheme_of(module, schemes, settings)
        plans[f"{module}.weight"] = _PLANS[scheme.format](tensors, module, scheme)
    for name, info in tensors.infos.items():
        module = name.removesuffix(".weight")
        is_weight = name.endswith(".weight") and len(info.shape) >= 2
        if name in plans or not is_weight or is_ignored(module, ignored):
            continue
        if any(scheme.names(module) for scheme in schemes):
            raise CheckpointError(
                f"{name} is {info}, and the config says that it is quantized"
            )
    return plans


def _modules(tensors: base.Tensors) -> list[str]:
    """Modules with quantized weights: those with scales, or with packed codes."""
    found = {
        module
        for suffix in (".weight_scale", ".weight_packed")
        for module in base.suffixed(tensors, suffix)
    }
    return sorted(found)


def _scale_shape(
    scheme: Scheme, shape: Sequence[int], name: str
) -> list[tuple[int, ...]]:
    """Shapes that the scales of a weight may have."""
    *leading, rows, columns = shape
    if scheme.strategy == "tensor":
        return [(), (1,), (*leading, 1, 1), (*leading, 1)]
    if scheme.strategy == "channel":
        return [(*leading, rows, 1), (*leading, rows)]
    if scheme.strategy == "block":
        if scheme.block is None:
            raise CheckpointError(f"{name}: the config has no block_structure")
        counts = (
            base.blocks(rows, scheme.block[0]),
            base.blocks(columns, scheme.block[1]),
        )
        return [(*leading, *counts)]
    if scheme.group is None:
        raise CheckpointError(f"{name}: the config has no group_size")
    return [(*leading, rows, base.blocks(columns, scheme.group))]


def _spread(scale: np.ndarray, scheme: Scheme, shape: Sequence[int]) -> np.ndarray:
    """Gives scales or zero points the rank of the weight, and blocks of one size."""
    if scheme.strategy == "block" and scheme.block is not None:
        for axis, size in zip((-2, -1), scheme.block, strict=True):
            scale = base.even(scale, axis, size, shape[axis])
    elif scheme.group is not None and scheme.strategy in ("group", "tensor_group"):
        scale = base.even(scale, -1, scheme.group, shape[-1])
    if scale.ndim < 2 and scheme.strategy == "tensor":
        return scale.reshape((1,) * len(shape))
    return fp8.keepdims(scale, len(shape))


def _text(scheme: Scheme, shape: Sequence[int]) -> str:
    sizes = {
        "tensor": "one scale",
        "channel": f"blocks of 1 x {shape[-1]}",
        "block": scheme.block and f"blocks of {scheme.block[0]} x {scheme.block[1]}",
    }
    return sizes.get(scheme.strategy) or f"blocks of 1 x {scheme.group}"


def _plan_packed(tensors: base.Tensors, module: str, scheme: Scheme) -> base.Weight:
    name = f"{module}.weight_packed"
    if not 1 <= scheme.bits <= 8:
        raise CheckpointError(f"{name}: {scheme.bits} bits are not packed in words")
    packed = base.require(tensors, name, [base.INT32])
    shape = _stored_shape(tensors, module, packed.shape)
    counts = [(shape[-1], packed.shape[-1])]
    packings = fitting(scheme.bits, counts)
    if packed.shape[:-1] != shape[:-1] or not packings:
        raise CheckpointError(
            f"{name} is {packed}, into which {scheme.bits} bits of a weight of shape "
            f"{list(shape)} are not packed"
        )
    scales = _scale_shape(scheme, shape, module)
    base.require(tensors, f"{module}.weight_scale", base.FLOATS, scales)
    used = [name, f"{module}.weight_scale", f"{module}.weight_shape"]
    if not scheme.is_symmetric:
        if not scales[0]:
            raise CheckpointError(
                f"{name}: packed weights have zero points for each channel or group, "
                "not for a whole tensor (strategy 'tensor' with symmetric false)"
            )
        *leading, rows, columns = scales[0]
        words = [
            (*leading, packing.words(rows, scheme.bits), columns)
            for packing in packings
        ]
        zero = f"{module}.weight_zero_point"
        used.append(zero)
        info = base.require(tensors, zero, [base.INT32], words)
        counts.append((rows, info.shape[-2]))
    if f"{module}.weight_g_idx" in tensors.infos:
        used.append(f"{module}.weight_g_idx")
        base.require(tensors, used[-1], [base.INT32], [shape[-1:]])
    elif scheme.has_g_idx:
        raise CheckpointError(f"{module} has no weight_g_idx, which actorder asks for")
    packing = packing_of(name, scheme.bits, counts, scheme.is_dense)
    zeros = "" if scheme.is_symmetric else ", zero points"
    return base.weight(
        tensors,
        used,
        shape,
        f"int{scheme.bits}, {_text(scheme, shape)}{zeros}",
        functools.partial(_read_packed, tensors, module, scheme, shape, packing),
    )


def _stored_shape(
    tensors: base.Tensors, module: str, packed: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of a packed weight, which a tensor of the file holds."""
    name = f"{module}.weight_shape"
    dtypes = (np.dtype("int64"), base.INT32)
    base.require(tensors, name, dtypes, [(len(packed),)])
    shape = tuple(int(size) for size in tensors.read(name))
    if len(shape) < 2 or min(shape) < 0:
        raise CheckpointError(
            f"{name} holds {list(shape)}, which is no shape of a weight"
        )
    return shape


def _read_packed(
    tensors: base.Tensors,
    module: str,
    scheme: Scheme,
    shape: tuple[int, ...],
    packing: Packing,
) -> QTensor:
    words = tensors.read(f"{module}.weight_packed")
    values = _centred(packing.unpack(words, scheme.bits, shape[-1]), scheme.bits)
    scale_name = f"{module}.weight_scale"
    stored = base.checked_scale(scale_name, tensors.read(scale_name))
    if scheme.strategy in ("tensor", "channel"):
        stored = _spread(stored, scheme, shape)
    zero = None
    if not scheme.is_symmetric:
        packed = np.swapaxes(tensors.read(f"{module}.weight_zero_point"), -1, -2)
        rows = stored.shape[-2]
        codes = packing.unpack(np.ascontiguousarray(packed), scheme.bits, rows)
        zero = np.swapaxes(_centred(codes, scheme.bits), -1, -2)
    if f"{module}.weight_g_idx" in tensors.infos:
        index = tensors.read(f"{module}.weight_g_idx")
        group = min(scheme.group or shape[-1], max(shape[-1], 1))
        in_order = np.arange(shape[-1]) // max(group, 1)
        # -1 everywhere stands for the order of the inputs.
        if not (np.array_equal(index, in_order) or (index == -1).all()):
            if not 0 <= index.min() <= index.max() < stored.shape[-1]:
                raise CheckpointError(
                    f"{module}.weight_g_idx names groups that are not"
                )
            if scheme.strategy == "block":
                raise CheckpointError(
                    f"{module}.weight_g_idx orders groups, and the config has scales "
                    "of blocks (strategy 'block')"
                )
            taken = stored[..., index], None if zero is None else zero[..., index]
            return base.integers(values, scheme.bits, *taken)
    scale = _spread(stored, scheme, shape)
    spread = None if zero is None else _spread(zero, scheme, shape)
    return base.integers(values, scheme.bits, scale, spread)


def _centred(codes: np.ndarray, width: int) -> np.ndarray:
    """Takes the 2^(bits - 1) off that packing added; int8."""
    return (codes - np.uint8(2 ** (width - 1))).view(np.int8)


def _plan_int8(tensors: base.Tensors, module: str, scheme: Scheme) -> base.Weight:
    names = [f"{module}.weight", f"{module}.weight_scale"]
    info = base.require(tensors, names[0], [base.INT8])
    shape = _matrix(names[0], info.shape)
    scales = _scale_shape(scheme, shape, module)
    base.require(tensors, names[1], base.FLOATS, scales)
    if not scheme.is_symmetric:
        names.append(f"{module}.weight_zero_point")
        base.require(tensors, names[2], [base.INT8], scales)
    zeros = "" if scheme.is_symmetric else ", zero points"
    return base.weight(
        tensors,
        names,
        shape,
        f"int8, {_text(scheme, shape)}{zeros}",
        functools.partial(_read_int8, tensors, names, scheme, shape),
    )


def _read_int8(
    tensors: base.Tensors, names: list[str], scheme: Scheme, shape: tuple[int, ...]
) -> QTensor:
    scale = base.checked_scale(names[1], tensors.read(names[1]))
    zero = None
    if not scheme.is_symmetric:
        zero = _spread(tensors.read(names[2]), scheme, shape)
    return base.integers(tensors.read(names[0]), 8, _spread(scale, scheme, shape), zero)


def _plan_fp8(tensors: base.Tensors, module: str, scheme: Scheme) -> base.Weight:
    name = f"{module}.weight"
    info = base.require(tensors, name, [base.E4M3])
    shape = _matrix(name, info.shape)
    scales = _scale_shape(scheme, shape, module)
    is_mx = scheme.format == "mxfp8-quantized"
    dtypes = base.EXPONENTS if is_mx else base.FLOATS
    base.require(tensors, f"{module}.weight_scale", dtypes, scales)
    return base.weight(
        tensors,
        (name, f"{module}.weight_scale"),
        shape,
        f"{'mxfp8' if is_mx else 'fp8_e4m3'}, {_text(scheme, shape)}",
        functools.partial(_read_fp8, tensors, module, scheme, is_mx),
    )


def _read_fp8(
    tensors: base.Tensors, module: str, scheme: Scheme, is_mx: bool
) -> QTensor:
    name = f"{module}.weight_scale"
    values, stored = tensors.read(f"{module}.weight"), tensors.read(name)
    decode = base.powers_of_two if is_mx else base.checked_scale
    scale = _spread(decode(name, stored), scheme, values.shape)
    return base.on_grid(values, scale, fp8.GRID)


def _plan_fp4(tensors: base.Tensors, module: str, scheme: Scheme) -> base.Weight:
    name = f"{module}.weight_packed"
    packed = base.require(tensors, name, [base.UINT8])
    *leading, half = _matrix(name, packed.shape)
    shape = (*leading, 2 * half)
    is_mx = scheme.format == "mxfp4-pack-quantized"
    scales = _scale_shape(scheme, shape, module)
    dtypes = base.EXPONENTS if is_mx else (base.E4M3,)
    used = [name, f"{module}.weight_scale"]
    base.require(tensors, used[1], dtypes, scales)
    if not is_mx:
        used.append(f"{module}.weight_global_scale")
        base.require(tensors, used[2], [np.dtype("float32")], [(1,), ()])
    return base.weight(
        tensors,
        used,
        shape,
        f"{'mxfp4' if is_mx else 'nvfp4'}, {_text(scheme, shape)}",
        functools.partial(_read_fp4, tensors, module, scheme, shape),
    )


def _read_fp4(
    tensors: base.Tensors, module: str, scheme: Scheme, shape: tuple[int, ...]
) -> QTensor:
    values = bits.e2m1(bits.nibbles(tensors.read(f"{module}.weight_packed")))
    name = f"{module}.weight_scale"
    stored = tensors.read(name)
    if scheme.format == "mxfp4-pack-quantized":
        scale = base.powers_of_two(name, stored)
    else:
        top = f"{module}.weight_global_scale"
        divisor = base.checked_scale(top, tensors.read(top)).reshape(())
        if not divisor > 0:
            raise CheckpointError(f"{top} is 0, and divides")
        quotient = base.checked_scale(name, stored) / divisor
        scale = base.checked_scale(name, quotient)
    return base.on_grid(values, _spread(scale, scheme, shape), bits.E2M1)


def _matrix(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        raise CheckpointError(f"{name} has the shape {list(shape)}, not a matrix's")
    return shape


_PLANS = {
    "pack-quantized": _plan_packed,
    "int-quantized": _plan_int8,
    "float-quantized": _plan_fp8,
    "naive-quantized": _plan_fp8,
    "mxfp8-quantized": _plan_fp8,
    "nvfp4-pack-quantized": _plan_fp4,
    "mxfp4-pack-quantized": _plan_fp4,
}

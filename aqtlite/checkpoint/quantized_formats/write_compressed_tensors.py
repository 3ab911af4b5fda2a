"""Writing of compressed-tensors: integers of 1 to 8 bits, fp8 and MXFP4."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import bits, fp8, writing
from aqtlite.qtensor.qtensor import QTensor

_MX_BLOCK = 32
_VERSION = "0.18.0"
"""The first version of the package that packs integers as they are packed here."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a weight is stored: a group of the config for all weights that share it."""

    format: str
    bits: int
    type: str
    strategy: str
    group: int | None = None
    block: tuple[int, int] | None = None
    is_symmetric: bool = True

    def to_dict(self, targets: Sequence[str]) -> dict[str, Any]:
        """The group of the config."""
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.type,
            "symmetric": self.is_symmetric,
            "strategy": self.strategy,
            "group_size": self.group,
            "block_structure": None if self.block is None else list(self.block),
            "dynamic": False,
        }
        if self.format == "mxfp4-pack-quantized":
            weights["scale_dtype"] = weights["zp_dtype"] = "torch.uint8"
        return {
            "targets": list(targets),
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": self.format,
        }


def pieces(module: str, q: QTensor) -> tuple[Scheme, dict[str, np.ndarray]]:
    """Spreads a weight, (outputs, inputs), over the tensors of its format.

    Raises:
        CheckpointError: if the format has no such weights.
    """
    q = writing.matrix(module, q)
    if q.numerics == fp8.GRID:
        return _fp8(q)
    if q.numerics == bits.E2M1:
        return _mxfp4(module, q)
    return _packed(module, q)


def config(schemes: Mapping[str, Scheme], in_float: Sequence[str]) -> Mapping[str, Any]:
    """The `quantization_config` of modules with schemes, and of modules without."""
    distinct = list(dict.fromkeys(schemes.values()))
    groups = {}
    for i, scheme in enumerate(distinct):
        named = [module for module, one in schemes.items() if one == scheme]
        targets = ["Linear"] if len(distinct) == 1 else named
        groups[f"group_{i}"] = scheme.to_dict(targets)
    formats = {scheme.format for scheme in distinct}
    return {
        "quant_method": "compressed-tensors",
        "version": _VERSION,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(in_float),
        "kv_cache_scheme": None,
    }


def _packed(module: str, q: QTensor) -> tuple[Scheme, dict[str, np.ndarray]]:
    found = writing.integers_of(module, q)
    scale = writing.of_rows(q.scale, q.shape)
    if scale is None:
        raise CheckpointError(
            f"{module}, {q!r}, has blocks over several outputs, which integers of "
            "compressed-tensors have not"
        )
    middle = np.int16(2 ** (found.bits - 1))
    codes = (found.values.astype(np.int16) + middle).astype(np.uint8)
    tensors = {
        "weight_packed": bits.to_words(codes, found.bits),
        "weight_scale": scale,
        "weight_shape": np.array(q.shape, np.int64),
    }
    if found.zero is not None:
        zero = (np.broadcast_to(found.zero, scale.shape) + middle).astype(np.uint8)
        words = bits.to_words(np.ascontiguousarray(zero.T), found.bits)
        tensors["weight_zero_point"] = np.ascontiguousarray(words.T)
    return _scheme("pack-quantized", found.bits, "int", q, found.zero is None), tensors


def _fp8(q: QTensor) -> tuple[Scheme, dict[str, np.ndarray]]:
    scale = writing.of_rows(q.scale, q.shape)
    if q.scale.size == 1:
        scheme = Scheme("float-quantized", 8, "float", "tensor")
        scale = q.scale.reshape(1)
    elif scale is None:
        rows, columns = q.blocks
        scheme = Scheme("float-quantized", 8, "float", "block", block=(rows, columns))
        scale = q.scale
    else:
        scheme = _scheme("float-quantized", 8, "float", q, is_symmetric=True)
    return scheme, {"weight": q.qvalue, "weight_scale": scale}


def _mxfp4(module: str, q: QTensor) -> tuple[Scheme, dict[str, np.ndarray]]:
    scale = writing.of_rows(q.scale, q.shape)
    codes = None if scale is None else writing.exponents(scale)
    if codes is None or q.blocks[1] != _MX_BLOCK:
        raise CheckpointError(
            f"{module}, {q!r}: of fp4, compressed-tensors are written with powers of "
            f"two for {_MX_BLOCK} inputs, MXFP4"
        )
    packed = bits.packed_nibbles(bits.e2m1_nibbles(q.qvalue))
    scheme = _scheme("mxfp4-pack-quantized", 4, "float", q, is_symmetric=True)
    return scheme, {"weight_packed": packed, "weight_scale": codes}


def _scheme(
    format_: str, width: int, type_: str, q: QTensor, is_symmetric: bool
) -> Scheme:
    if q.scale.shape[1] == 1:
        return Scheme(format_, width, type_, "channel", is_symmetric=is_symmetric)
    return Scheme(
        format_, width, type_, "group", group=q.blocks[1], is_symmetric=is_symmetric
    )

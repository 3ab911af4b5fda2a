"""Quantization configs: frozen, hashable, validated data.

A `DotGeneral` holds a `DotGeneralRaw` for each of three contractions, and each of these
holds a `Tensor` per operand. `training`, `post_training` and `block_formats` build
configs (`catalogue` lists these presets), `update` changes fields by path, and
`serialization` writes configs as JSON. Read `tensor` first, then `dot_general`.
"""

import difflib
from typing import NoReturn

from aqtlite.config.blocks import Blocks, LocalAqt
from aqtlite.config.describe import describe
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.double_scales import DoubleScales
from aqtlite.config.json.registry import register
from aqtlite.config.json.serialization import from_json, to_json
from aqtlite.config.lora import Dora, Lora
from aqtlite.config.of_activations import for_activations, for_values
from aqtlite.config.optimizer_states import OptimizerStates
from aqtlite.config.recipes.block_formats import (
    block_fp8,
    mxfp4,
    mxfp6,
    mxfp8,
    mxint8,
    nvfp4,
)
from aqtlite.config.recipes.catalogue import Preset, Presets, presets
from aqtlite.config.recipes.post_training import gptq, smoothquant, static_int8
from aqtlite.config.recipes.training import (
    fp8,
    fully_quantized,
    lsq,
    lsq_weight_only,
    qat,
    unquantized,
    w4a8,
    weight_only,
)
from aqtlite.config.representation import differences
from aqtlite.config.rotation import Hadamard
from aqtlite.config.rounding import Gptq
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.sparsity import NofM
from aqtlite.config.tensor import Tensor
from aqtlite.config.update import update

__all__ = [
    "Blocks",
    "Dora",
    "DotGeneral",
    "DotGeneralRaw",
    "DoubleScales",
    "Gptq",
    "Hadamard",
    "LocalAqt",
    "Lora",
    "NofM",
    "OptimizerStates",
    "Preset",
    "Presets",
    "Smoothing",
    "Tensor",
    "block_fp8",
    "describe",
    "differences",
    "for_activations",
    "for_values",
    "fp8",
    "from_json",
    "fully_quantized",
    "gptq",
    "lsq",
    "lsq_weight_only",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "mxint8",
    "nvfp4",
    "presets",
    "qat",
    "register",
    "smoothquant",
    "static_int8",
    "to_json",
    "unquantized",
    "update",
    "w4a8",
    "weight_only",
]


def __getattr__(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, __all__, 1, 0.85)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise AttributeError(
        f"aqtlite.config has no {name!r}{hint} The presets are {', '.join(presets())}; "
        "fully_quantized(fwd_bits=8, bwd_bits=8) is int8"
    )

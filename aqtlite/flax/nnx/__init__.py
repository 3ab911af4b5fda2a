"""Quantized NNX models, and their conversion to serving.

`quantize_model` quantizes an unmodified model by rules; `AqtDotGeneral`, `AqtEinsum`
and `AqtConvGeneralDilated` are arguments of layers instead. `convert` freezes the
weights of both. Read `quantize` first.
"""

from aqtlite.flax.call import Call
from aqtlite.flax.nnx.biases import correct_biases
from aqtlite.flax.nnx.cache import QuantizedCache
from aqtlite.flax.nnx.calibrate import calibrate, calibrate_in_float
from aqtlite.flax.nnx.convert import convert, convert_in_place
from aqtlite.flax.nnx.injection import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    AqtEinsum,
    AqtEmbed,
)
from aqtlite.flax.nnx.merge_adapters import merge_adapters
from aqtlite.flax.nnx.model import (
    Frozen,
    GradientStatistics,
    Quantization,
    QuantizedModel,
    Statistics,
)
from aqtlite.flax.nnx.quantize import (
    init_state,
    overwrite_with_gradient,
    plan,
    quantize_model,
)

__all__ = [
    "AqtConvGeneralDilated",
    "AqtDotGeneral",
    "AqtEinsum",
    "AqtEmbed",
    "Call",
    "Frozen",
    "GradientStatistics",
    "Quantization",
    "QuantizedCache",
    "QuantizedModel",
    "Statistics",
    "calibrate",
    "calibrate_in_float",
    "convert",
    "convert_in_place",
    "correct_biases",
    "init_state",
    "merge_adapters",
    "overwrite_with_gradient",
    "plan",
    "quantize_model",
]

"""Quantized contractions for Flax, and the conversion of trained models to serving.

`linen` and `nnx` adapt the two module systems: they pass variables to `aqtlite.program`
as pytrees and put the results back. `aqtlite.flax` exports the names for Linen,
`aqtlite.flax.nnx` those for NNX. Read `linen.dot_general` first.
"""

from aqtlite.flax.call import Call
from aqtlite.flax.linen import serialization as _serialization
from aqtlite.flax.linen.conv_general_dilated import AqtConvGeneralDilated
from aqtlite.flax.linen.convert import convert
from aqtlite.flax.linen.dot_general import AqtDotGeneral, QuantMode
from aqtlite.flax.linen.einsum import AqtEinsum
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.quantize_model import QuantizedModel, quantize_model
from aqtlite.flax.linen.ragged_dot import AqtRaggedDot
from aqtlite.flax.linen.tools.absorb_smoothing import absorb_smoothing
from aqtlite.flax.linen.tools.adapters import (
    adapters_of,
    with_adapters,
    with_initial_adapters,
)
from aqtlite.flax.linen.tools.biases import correct_biases
from aqtlite.flax.linen.tools.cache import QuantizedCache, map_caches
from aqtlite.flax.linen.tools.calibrate import (
    calibrate,
    calibrate_in_float,
    merge_statistics,
)
from aqtlite.flax.linen.tools.dtypes import promote_dtype
from aqtlite.flax.linen.tools.embed import AqtEmbed, AqtTake
from aqtlite.flax.linen.tools.fold_batch_norm import fold_batch_norm
from aqtlite.flax.linen.tools.injection import inject_dot_general
from aqtlite.flax.linen.tools.merge_adapters import merge_adapters
from aqtlite.flax.linen.tools.widen import widen_int4
from aqtlite.program.serving.report import ConversionReport, ParameterReport

_serialization.register()

__all__ = [
    "AqtConvGeneralDilated",
    "AqtDotGeneral",
    "AqtEinsum",
    "AqtEmbed",
    "AqtRaggedDot",
    "AqtTake",
    "Call",
    "ConversionReport",
    "FrozenKernel",
    "ParameterReport",
    "QuantMode",
    "QuantizedCache",
    "QuantizedModel",
    "absorb_smoothing",
    "adapters_of",
    "calibrate",
    "calibrate_in_float",
    "convert",
    "correct_biases",
    "fold_batch_norm",
    "inject_dot_general",
    "map_caches",
    "merge_adapters",
    "merge_statistics",
    "promote_dtype",
    "quantize_model",
    "widen_int4",
    "with_adapters",
    "with_initial_adapters",
]

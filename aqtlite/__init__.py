"""Quantized contractions for JAX: int8 and int4 training and serving.

A *config* (`aqtlite.config`) says what to quantize and how. `make_dot_general` turns
it into a function with the signature of `jax.lax.dot_general` and quantized gradients,
`make_conv_general_dilated` into one with that of `jax.lax.conv_general_dilated`, and
`make_ragged_dot` into one with that of `jax.lax.ragged_dot`; `aqtlite.flax` puts them
into Flax layers, and freezes trained weights for serving. `quantize_function` quantizes
the contractions of any function by rules, and `convert_function` freezes its weights.
"""

from aqtlite import kv_cache
from aqtlite.contraction import einsum_states, remat
from aqtlite.contraction.conv_general_dilated import (
    make_conv_general_dilated,
)
from aqtlite.contraction.dot_general import make_dot_general
from aqtlite.contraction.einsum import einsum
from aqtlite.contraction.ragged_dot import make_ragged_dot
from aqtlite.jaxpr.registry import register_operation
from aqtlite.program import rules
from aqtlite.program.calibration_state import with_gradient_statistics
from aqtlite.program.compile_serving import ServingProgram, compile_serving
from aqtlite.program.convert import convert_function
from aqtlite.program.quantize import plan, quantize_function
from aqtlite.program.rules import Rule
from aqtlite.qtensor import shape_operations
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import fixed_scale, statistics
from aqtlite.quantization.operands import quantize
from aqtlite.quantization.stored_statistics import restored_statistics

__all__ = [
    "QTensor",
    "Rule",
    "ServingProgram",
    "__version__",
    "compile_serving",
    "convert_function",
    "einsum",
    "einsum_states",
    "fixed_scale",
    "kv_cache",
    "make_conv_general_dilated",
    "make_dot_general",
    "make_ragged_dot",
    "plan",
    "quantize",
    "quantize_function",
    "register_operation",
    "remat",
    "restored_statistics",
    "rules",
    "shape_operations",
    "statistics",
    "with_gradient_statistics",
]

__version__ = "0.1.0"

_MODULES = [
    *("calibration", "checkpoint", "config", "edge", "errors", "flax"),
    *("noise", "numerics", "testing"),
]


def __dir__() -> list[str]:
    """Public names and modules; all else in the package is private."""
    return [*__all__, *_MODULES]

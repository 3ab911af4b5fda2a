"""Quantized contractions for JAX: int8 and int4 training and serving.

A *config* (`aqtlite.config`) says what to quantize and how. `make_dot_general` turns
it into a function with the signature of `jax.lax.dot_general` and quantized gradients,
`make_conv_general_dilated` into one with that of `jax.lax.conv_general_dilated`, and
`make_ragged_dot` into one with that of `jax.lax.ragged_dot`; `aqtlite.flax` puts them
into Flax layers, and freezes trained weights for serving. `quantize_function` quantizes
the contractions of any function by rules, and `convert_function` freezes its weights.
"""

from aqtlite import kv_cache, remat, shape_operations
from aqtlite.conv_general_dilated import make_conv_general_dilated
from aqtlite.dot_general import make_dot_general
from aqtlite.einsum import einsum
from aqtlite.functions import rules
from aqtlite.functions.convert import convert_function
from aqtlite.functions.quantize import plan, quantize_function
from aqtlite.functions.rules import Rule
from aqtlite.functions.states import with_gradient_statistics
from aqtlite.jaxpr.registry import register_operation
from aqtlite.qtensor import QTensor
from aqtlite.quantizer import quantize
from aqtlite.ragged_dot import make_ragged_dot

__all__ = [
    "QTensor",
    "Rule",
    "__version__",
    "convert_function",
    "einsum",
    "kv_cache",
    "make_conv_general_dilated",
    "make_dot_general",
    "make_ragged_dot",
    "plan",
    "quantize",
    "quantize_function",
    "register_operation",
    "remat",
    "rules",
    "shape_operations",
    "with_gradient_statistics",
]

__version__ = "0.1.0"

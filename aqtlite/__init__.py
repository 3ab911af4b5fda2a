"""Quantized contractions for JAX: int8 and int4 training and serving.

A *config* (`aqtlite.config`) says what to quantize and how. `make_dot_general` turns
it into a function with the signature of `jax.lax.dot_general` and quantized gradients,
`make_conv_general_dilated` into one with that of `jax.lax.conv_general_dilated`, and
`make_ragged_dot` into one with that of `jax.lax.ragged_dot`; `aqtlite.flax` puts them
into Flax layers, and freezes trained weights for serving.
"""

from aqtlite import kv_cache, shape_operations
from aqtlite.conv_general_dilated import make_conv_general_dilated
from aqtlite.dot_general import make_dot_general
from aqtlite.einsum import einsum
from aqtlite.qtensor import QTensor
from aqtlite.quantizer import quantize
from aqtlite.ragged_dot import make_ragged_dot

__all__ = [
    "QTensor",
    "__version__",
    "einsum",
    "kv_cache",
    "make_conv_general_dilated",
    "make_dot_general",
    "make_ragged_dot",
    "quantize",
    "shape_operations",
]

__version__ = "0.1.0"

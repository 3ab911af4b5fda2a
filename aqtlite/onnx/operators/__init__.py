"""ONNX operators as functions of JAX, a file for each family.

Importing a module registers its operators. Read `elementwise` first.
"""

from aqtlite.onnx.operators import (
    activations,
    attention,
    control_flow,
    convolutions,
    elementwise,
    indexing,
    layout,
    making,
    matrices,
    normalization,
    pooling,
    quantization,
    recurrent,
    reductions,
    resizing,
    sequences,
)

__all__ = [
    "activations",
    "attention",
    "control_flow",
    "convolutions",
    "elementwise",
    "indexing",
    "layout",
    "making",
    "matrices",
    "normalization",
    "pooling",
    "quantization",
    "recurrent",
    "reductions",
    "resizing",
    "sequences",
]

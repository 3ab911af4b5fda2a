"""ONNX networks as functions of JAX.

`load` reads a file and returns a function and its parameters, which every route of this
library can quantize. Read `evaluation` first, then a file of `operators`.
"""

import aqtlite.onnx.operators  # noqa: F401 - registers them
from aqtlite.onnx.evaluation import Call
from aqtlite.onnx.network import Array, Network, load
from aqtlite.onnx.registry import operator

__all__ = ["Array", "Call", "Network", "load", "operator"]

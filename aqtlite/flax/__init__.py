"""Quantized contractions for Flax, and the conversion of trained models to serving."""

from aqtlite.flax import serialization as _serialization
from aqtlite.flax.convert import convert
from aqtlite.flax.linen import AqtDotGeneral, AqtEinsum
from aqtlite.flax.mode import QuantMode
from aqtlite.flax.placeholder import FrozenKernel
from aqtlite.flax.report import ConversionReport, ParameterReport
from aqtlite.flax.tracing import Call

_serialization.register()

__all__ = [
    "AqtDotGeneral",
    "AqtEinsum",
    "Call",
    "ConversionReport",
    "FrozenKernel",
    "ParameterReport",
    "QuantMode",
    "convert",
]

"""Quantized contractions for Flax, and the conversion of trained models to serving."""

from aqtlite.flax import serialization as _serialization
from aqtlite.flax.convert import convert
from aqtlite.flax.linen import AqtDotGeneral, AqtEinsum
from aqtlite.flax.mode import QuantMode
from aqtlite.flax.placeholder import FrozenKernel

_serialization.register()

__all__ = ["AqtDotGeneral", "AqtEinsum", "FrozenKernel", "QuantMode", "convert"]

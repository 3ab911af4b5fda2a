"""Contractions as the quantization sees them: axes, gradients, scales, lowering."""

from aqtlite.operations.base import SIDES, DotInput, OperandAxes, Operation, Side
from aqtlite.operations.conv_general_dilated import ConvGeneralDilated
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.operations.ragged_dot import RaggedDot
from aqtlite.operations.tiled import Tiled

__all__ = [
    "SIDES",
    "ConvGeneralDilated",
    "DotGeneral",
    "DotInput",
    "OperandAxes",
    "Operation",
    "RaggedDot",
    "Side",
    "Tiled",
]

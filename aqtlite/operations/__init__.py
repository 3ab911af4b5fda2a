"""Private: contractions as the quantization sees them.

An operation says which axes of each operand are contracted, which operations its
gradients are, where a scale goes, and how it is lowered. Each is one file. Read `base`
first, then `dot_general`.
"""

from aqtlite.lowering import DotInput
from aqtlite.operations.base import SIDES, OperandAxes, Operation, Side
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

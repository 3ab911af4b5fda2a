"""Private: the interface between quantization and the contractions of `jax.lax`.

An operation defines the axes of its operands, the operations of its gradients, the
layout of scales, and the lowering. There is one file for each. Read `base` first, then
`dot_general`.
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

"""Operands of contractions that a model quantizes itself."""

import dataclasses
from typing import Any

import jax

from aqtlite import config
from aqtlite.edge.operators.base import Operator
from aqtlite.operations import Side
from aqtlite.qtensor.qtensor import QTensor


@dataclasses.dataclass(frozen=True)
class QuantizedOperand(Operator):
    """An operand that a config quantizes: a frozen weight, or a float array.

    The inputs are the leaves of a `QTensor`, or the float array.
    """

    cfg: config.DotGeneralRaw
    """Config of the contraction."""

    side: Side
    """Side of the operand."""

    structure: Any = None
    """Structure of the `QTensor`; None for a float array."""

    name = "quantized_operand"

    @property
    def other(self) -> config.Tensor:
        """Config of the other operand."""
        return self.cfg.lhs if self.side == "rhs" else self.cfg.rhs

    def qtensor(self, *leaves: Any) -> QTensor:
        """The frozen weight."""
        made: QTensor = jax.tree.unflatten(self.structure, leaves)
        return made

    def compute(self, *inputs: Any) -> Any:
        if self.structure is None:
            (x,) = inputs
            return x
        return self.qtensor(*inputs).dequant()

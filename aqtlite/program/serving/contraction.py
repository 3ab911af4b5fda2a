"""Quantized contractions in the trace of a model."""

import dataclasses
from typing import Any, NamedTuple

from aqtlite import config
from aqtlite.operations import Operation, Side
from aqtlite.program.serving.frozen_record import Operand
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import smoothing
from aqtlite.quantization.statistics import States


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A call of a quantized contraction inside a model."""

    cfg: config.DotGeneral
    frozen_operands: str
    """The operands to freeze: "auto", "lhs", "rhs", "both" or "none"."""

    name: str | None
    """Name for its frozen weights, instead of the names of their parameters."""

    operation: Operation
    lhs: Any
    rhs: Any
    states: States = States()
    """States of its calibrations."""

    def in_float(self) -> "Contraction":
        """Returns the contraction without quantization, which is cheaper to trace.

        A contraction with a `QTensor` operand, or with operands of two dtypes, is
        returned unchanged: `lax.dot_general` does not take them.
        """
        operands = self.lhs, self.rhs
        if any(isinstance(x, QTensor) for x in operands):
            return self
        if self.lhs.dtype != self.rhs.dtype:
            return self
        return dataclasses.replace(self, cfg=config.unquantized())

    def smoothed_operands(self) -> tuple[Any, Any]:
        """Returns the operands after smoothing, ready to be quantized."""
        raw = self.cfg.fwd
        if raw.smoothing is None:
            return self.lhs, self.rhs
        dims = smoothing.dims_of(self.operation)
        return smoothing.smooth(raw, self.lhs, self.rhs, dims, self.states.smoothing)

    def array(self, side: Side) -> Any:
        """Returns the array of one side."""
        return self.lhs if side == "lhs" else self.rhs

    def operand(self, side: Side) -> Operand:
        """Returns the static part of an operand."""
        x, axes = self.array(side), self.operation.axes(side).contracting
        return Operand(side, tuple(x.shape), tuple(sorted(axes)), x.dtype)

    def quantized_sides(self) -> list[Side]:
        """Returns the sides to quantize: those that are not `QTensor`s already."""
        raw = self.cfg.fwd
        sides: tuple[tuple[Side, config.Tensor, Any], ...] = (
            ("lhs", raw.lhs, self.lhs),
            ("rhs", raw.rhs, self.rhs),
        )
        return [
            side
            for side, tensor, x in sides
            if tensor.is_quantized and not isinstance(x, QTensor)
        ]


class OperandKey(NamedTuple):
    """Key of an operand, stable across traces of one call of a model."""

    path: tuple[str, ...]
    """Path of the calling module."""

    position: int
    """Index of the contraction among the contractions of the module."""

    side: Side

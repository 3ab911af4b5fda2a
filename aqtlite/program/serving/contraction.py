"""Quantized contractions in the trace of a model, and the weights made of operands."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.config import arithmetic
from aqtlite.contraction import poison, unit_blocks
from aqtlite.contraction.contract import is_product
from aqtlite.operations import Operation, Side
from aqtlite.program.serving.frozen_record import Operand
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import checks, double_scales, gptq, quantizer
from aqtlite.quantization.preparation import padding, preparation, sparsity
from aqtlite.quantization.states.statistics import States


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("qtensor", "original", "prepared", "signal", "noise"),
        *("values", "damping"),
    ],
    meta_fields=["sparsity"],
)
@dataclasses.dataclass(frozen=True)
class WeightOutputs:
    """What a trace outputs for a weight: arrays, or their output indices."""

    qtensor: Any
    """The frozen weight, a `QTensor`."""

    original: Any
    """The float operand."""

    prepared: Any
    """The operand smoothed and rotated, before it is pruned and quantized, with its
    axes in the order in which the weight is stored."""

    signal: Any
    """Sum of squares of `prepared`, float32, with its number of axes."""

    noise: Any
    """Sum of squares of the quantization error, like `signal`."""

    values: Any = None
    """Values that identify the float operand, in a framework whose calls do not see how
    it is computed."""

    damping: Any = None
    """`gptq.Rounded.damping`; None for a weight rounded as in training."""

    sparsity: config.NofM | None = None
    """How it was pruned; None if all of it was kept."""


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

    @property
    def is_product(self) -> bool:
        """Whether it stays in float, because each sum has one product."""
        return is_product(self.cfg, self.operation, tuple(self.rhs.shape))

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

    def prepared_operands(self) -> tuple[Any, Any]:
        """Returns the operands smoothed and rotated, not pruned yet."""
        raw, state = self.cfg.fwd, self.states.smoothing
        operands = self.lhs, self.rhs
        return preparation.smooth_and_rotate(raw, self.operation, *operands, state)

    def restored_rhs(self, prepared: jax.Array) -> jax.Array:
        """Returns a prepared rhs, rounded since, without smoothing and rotation."""
        raw, state = self.cfg.fwd, self.states.smoothing
        operands = self.lhs, self.rhs
        return preparation.restored_rhs(raw, self.operation, *operands, state, prepared)

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

    def weight_outputs(self, side: Side) -> WeightOutputs:
        """Returns what to record of an operand that is a weight."""
        operand, x = self.operand(side), self.array(side)
        lhs, rhs = self.prepared_operands()
        prepared = lhs if side == "lhs" else rhs
        qtensor, damping = self._quantized(operand, prepared)
        qtensor = dataclasses.replace(qtensor, dtype=operand.dtype)
        tensor = getattr(self.cfg.fwd, side)
        pruned = sparsity.of(tensor, operand.shape, self.operation.axes(side))
        # Flax stacks each array along an axis of its own: measured before that.
        measured = signal_and_noise(prepared, qtensor)
        if qtensor.order is not None:
            prepared = prepared.transpose(qtensor.order)
        return WeightOutputs(
            qtensor, x, prepared, *measured, damping=damping, sparsity=pruned
        )

    def _quantized(self, operand: Operand, x: Any) -> tuple[QTensor, jax.Array | None]:
        """Quantizes an operand in the fastest layout.

        As the contraction does, but for a rounding at conversion.

        Returns:
            The quantized operand, and the damping of a rounding by GPTQ.
        """
        raw, states = self.cfg.fwd, self.states
        tensor, other, state = raw.rhs, raw.lhs, states.rhs
        if operand.side == "lhs":
            tensor, other, state = raw.lhs, raw.rhs, states.lhs
        path = f"fwd.{operand.side}"
        # In the operation's order: blocks divide the axis of the last contracting pair.
        axes = self.operation.axes(operand.side)
        if not tensor.is_quantized:
            raise ValueError(f"{path} is not quantized: there is nothing to freeze")
        given, x = x, sparsity.prune(x, tensor, axes, path)
        x = self._padded(operand, x)
        quantized = quantizer.quantize_array(x, tensor, axes, path, state=state)
        checks.check_scale(quantized.scale.shape, tensor, axes, path)
        damping = None
        if tensor.rounding is not None:
            dense, moment = self._padded(operand, given), states.moment
            rounded = gptq.round_weights(
                quantized, dense, tensor, self.operation, given.shape, moment
            )
            quantized = dataclasses.replace(quantized, qvalue=rounded.qvalue)
            damping = rounded.damping
        if tensor.calibration.is_blind:
            marked = x, quantized, tensor, axes, path, state
            quantized = poison.with_poisoned_scale(*marked)
        if tensor.is_integer and other.is_integer and other.grid.zero_point_range:
            quantized = quantizer.with_sums(quantized, axes.contracting)
        if x.shape != given.shape:
            widths = padding.widths(x, like=given)
            quantized = dataclasses.replace(quantized, padding=widths)
        # Sums of floats depend on the order in which the trained model contracts them,
        # but for those of kernels.
        is_rhs = operand.side == "rhs"
        is_read = is_rhs and unit_blocks.reads_rhs(self.operation, quantized)
        if arithmetic.sums_integers(raw) or is_read:
            quantized = quantized.stored_in(operand.serving_order())
        if tensor.double_scales is not None:
            quantized = double_scales.encoded(quantized, tensor.double_scales)
        values = stored_values.to_save(quantized.qvalue, quantized.numerics)
        return dataclasses.replace(quantized, qvalue=values), damping

    def _padded(self, operand: Operand, x: Any) -> Any:
        """Returns an operand padded as the contraction pads it."""
        tensors = self.cfg.fwd.lhs, self.cfg.fwd.rhs
        if all(tensor.blocks is None for tensor in tensors):
            return x
        pair = (x, self.rhs) if operand.side == "lhs" else (self.lhs, x)
        lhs, rhs = padding.pad_operands(self.operation, *pair, tensors, "fwd")
        return lhs if operand.side == "lhs" else rhs


def signal_and_noise(x: jax.Array, qtensor: QTensor) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares of an array and of its quantization error."""
    x = x.astype(jnp.float32)
    served = double_scales.decoded(qtensor)
    noise = x - dataclasses.replace(served, dtype=jnp.dtype("float32")).dequant()
    return jnp.sum(x * x, keepdims=True), jnp.sum(noise * noise, keepdims=True)


class OperandKey(NamedTuple):
    """Key of an operand, stable across traces of one call of a model."""

    path: tuple[str, ...]
    """Path of the calling module."""

    position: int
    """Index of the contraction among the contractions of the module."""

    side: Side

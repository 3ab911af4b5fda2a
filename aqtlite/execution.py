"""The execution of a contraction and its gradients, resolved once.

`resolve` decides; the contraction, the validation of configs and `config.describe` read
its record. Nothing rewrites a config after it.
"""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from aqtlite import config, granularity
from aqtlite.config import arithmetic
from aqtlite.operations import Operation, Side
from aqtlite.qtensor import QTensor
from aqtlite.sharding import explicit_sharding

Operand = jax.Array | QTensor
Saved = Literal["float", "quantized"]

_FLOAT = config.DotGeneral()


@dataclasses.dataclass(frozen=True)
class OperandExecution:
    """The execution of one operand."""

    path: str
    """The path of its config."""

    tensor: config.Tensor
    """The config by which it is quantized, or was."""

    reuse: arithmetic.Reuse | None = None
    """None: the operand is quantized here, if at all."""

    @property
    def form(self) -> arithmetic.Form:
        """The form in which it enters the dot."""
        return arithmetic.form_of(self.tensor)

    @property
    def scales_output(self) -> bool:
        """True if the scale multiplies the sums."""
        return self.form in ("stored", "decoded")


@dataclasses.dataclass(frozen=True)
class ContractionExecution:
    """The execution of one contraction: the forward one, or one of its gradients."""

    path: str
    """ "fwd", "dlhs" or "drhs"."""

    lhs: OperandExecution
    rhs: OperandExecution
    in_dtype: np.dtype | None
    """A float dtype to contract in, None for that of the operands."""

    accumulator: np.dtype | None
    """A float dtype for the sums, None for int32 or float32."""

    out_dtype: np.dtype
    out_sharding: Any
    tiles: int | None = None
    """Into how many the first contracting axis is cut, None for no tiles."""

    salt: int = 0
    """Tells the noise of this contraction from that of its siblings."""

    @property
    def kind(self) -> arithmetic.Kind:
        """The kind of dot."""
        return arithmetic.kind_of(self.lhs.form, self.rhs.form, self.in_dtype)

    @property
    def needs_noise(self) -> bool:
        """True if rounding is stochastic."""
        return self.lhs.tensor.needs_noise


@dataclasses.dataclass(frozen=True)
class Execution:
    """A contraction and its gradients."""

    fwd: ContractionExecution
    dlhs: ContractionExecution
    drhs: ContractionExecution
    saves_lhs: Saved
    """The residual of lhs, which `drhs` reads."""

    saves_rhs: Saved
    """The residual of rhs, which `dlhs` reads."""

    differentiated: tuple[Side, ...] = ()
    """The operands that an enclosing differentiation differentiates."""

    def gradient(self, side: Side) -> ContractionExecution:
        """The contraction that gives the gradient of an operand."""
        return self.dlhs if side == "lhs" else self.drhs

    def saves(self, side: Side) -> Saved:
        """The residual of an operand, which the gradient of the other one reads."""
        return self.saves_lhs if side == "lhs" else self.saves_rhs


def resolve(
    cfg: config.DotGeneral,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    out_dtype: np.dtype,
    out_sharding: Any = None,
) -> Execution:
    """Resolves a config for an operation on operands of these types.

    Args:
        cfg: what to quantize.
        operation: the contraction.
        lhs: an array, or a `QTensor` in place of one that the config quantizes.
        rhs: the same.
        out_dtype: of the result.
        out_sharding: of the result, on a mesh with explicit axes.

    Raises:
        ValueError: if ``calib_shared_axes`` names axes that an operand lacks.
    """
    fwd = ContractionExecution(
        path="fwd",
        lhs=OperandExecution("fwd.lhs", cfg.fwd.lhs),
        rhs=OperandExecution("fwd.rhs", cfg.fwd.rhs),
        in_dtype=cfg.fwd.dg_in_dtype,
        accumulator=arithmetic.float_accumulator(cfg.fwd),
        out_dtype=out_dtype,
        out_sharding=out_sharding,
    )
    return _with_gradients(fwd, cfg, operation, lhs, rhs)


def resolve_gradient(
    gradient: ContractionExecution, operation: Operation, g: jax.Array, other: Operand
) -> Execution:
    """Resolves a gradient as a contraction of its own, whose gradients are float.

    Args:
        gradient: ``execution.gradient(side)``.
        operation: ``operation.gradient(side)``.
        g: the gradient of the output.
        other: the other operand.
    """
    return _with_gradients(gradient, _FLOAT, operation, g, other)


def _with_gradients(fwd, cfg, operation, lhs, rhs) -> Execution:
    return Execution(
        fwd=fwd,
        dlhs=_gradient(cfg, operation, "lhs", lhs, rhs),
        drhs=_gradient(cfg, operation, "rhs", rhs, lhs),
        saves_lhs=_saved(cfg.fwd.lhs, cfg.drhs, lhs),
        saves_rhs=_saved(cfg.fwd.rhs, cfg.dlhs, rhs),
    )


def _saved(tensor: config.Tensor, backward: config.DotGeneralRaw, x: Operand) -> Saved:
    is_reused = tensor.is_quantized and backward.rhs.use_fwd_quant
    return "quantized" if is_reused or isinstance(x, QTensor) else "float"


def _gradient(
    cfg: config.DotGeneral,
    operation: Operation,
    side: Side,
    own: Operand,
    other: Operand,
) -> ContractionExecution:
    """The contraction that gives the gradient of `own`."""
    other_side: Side
    if side == "lhs":
        path, raw, forward, other_side = "dlhs", cfg.dlhs, cfg.fwd.rhs, "rhs"
    else:
        path, raw, forward, other_side = "drhs", cfg.drhs, cfg.fwd.lhs, "lhs"
    accumulator = arithmetic.float_accumulator(raw)
    reuse, tensor = None, raw.rhs
    if _saved(forward, raw, other) == "quantized":
        accumulator = None
        if isinstance(other, QTensor):
            scale_shape = other.scale.shape
        else:
            contracting = operation.axes(other_side).contracting
            forward_path = f"fwd.{other_side}"
            scale_shape = granularity.scale_shape(
                forward, other.shape, contracting, forward_path
            )
        kept = operation.gradient(side).axes("rhs").remaining
        moves = all(scale_shape[axis] == 1 for axis in kept)
        reuse, tensor = arithmetic.reused(raw, forward, scale_moves=moves)
    local = raw.local_aqt
    return ContractionExecution(
        path=path,
        lhs=OperandExecution(f"{path}.lhs", raw.lhs),
        rhs=OperandExecution(f"{path}.rhs", tensor, reuse),
        in_dtype=raw.dg_in_dtype,
        accumulator=accumulator,
        out_dtype=np.dtype(own.dtype),
        out_sharding=None if isinstance(own, QTensor) else explicit_sharding(own),
        tiles=None if local is None else local.contraction_axis_shard_count,
        salt=1 if side == "lhs" else 2,
    )

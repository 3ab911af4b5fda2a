"""The execution of a contraction and its gradients, resolved once.

Before: `contraction/contract.py`, which checked and prepared the operands.
Next: `contraction/quantized_sums.py`, the forward half that runs so.

`resolve` turns a config into an `Execution`, which the contraction reads; no config is
rewritten after that. Decisions that depend on the config alone are in
`config.arithmetic`, which `config.describe` reads, too.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite import config
from aqtlite.config import arithmetic
from aqtlite.contraction import scale_moves
from aqtlite.lowering import exact
from aqtlite.operations import SIDES, Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization import granularity
from aqtlite.shapes.sharding import sharding_of_gradient

Saved = Literal["float", "quantized"]

_FLOAT = config.DotGeneral()

# The order in which salts number the operands.
_PATHS = "fwd.lhs", "dlhs.lhs", "drhs.lhs", "fwd.rhs", "dlhs.rhs", "drhs.rhs"


class _OperandType(NamedTuple):
    """The properties of an operand on which the execution depends."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding | None
    """Sharding on a mesh with explicit axes, otherwise None."""

    scale_shape: tuple[int, ...] | None
    """Shape of the scale of a `QTensor`, None for an array."""


def _type_of(x: Operand) -> _OperandType:
    if isinstance(x, QTensor):
        floats = x.unrounded
        sharding = None if floats is None else sharding_of_gradient(floats)
        return _OperandType(x.shape, np.dtype(x.dtype), sharding, x.scale.shape)
    return _OperandType(x.shape, np.dtype(x.dtype), sharding_of_gradient(x), None)


@dataclasses.dataclass(frozen=True)
class OperandExecution:
    """The execution of one operand."""

    path: str
    """Path of the operand's config, as ``"fwd.lhs"``."""

    tensor: config.Tensor
    """Config of the operand, with the blocks of ``local_aqt`` if there is one."""

    form: arithmetic.Form
    """Form in which the operand enters the dot."""

    salt: int
    """Number that gives each operand its own noise."""

    reuse: arithmetic.Reuse | None = None
    """How a gradient reuses an operand of the forward pass; None if it does not."""

    is_given: bool = False
    """Whether the operand is given quantized, as a `QTensor`."""

    scale_moves: bool = False
    """Whether the scale multiplies the other operand, before that one is quantized."""

    @property
    def scales_output(self) -> bool:
        """Whether the scale multiplies the sums."""
        return self.form in ("stored", "narrow", "decoded")


@dataclasses.dataclass(frozen=True)
class ContractionExecution:
    """The execution of one contraction: the forward one, or one of its gradients."""

    path: str
    """ "fwd", "dlhs" or "drhs"."""

    lhs: OperandExecution
    rhs: OperandExecution
    kind: arithmetic.Kind
    """Kind of dot."""

    in_dtype: np.dtype | None
    """Float dtype to contract in, None for the dtype of the operands."""

    accumulator: np.dtype | None
    """Float dtype of the sums, None for int32 or float32."""

    out_dtype: np.dtype
    out_sharding: NamedSharding | None

    needs_noise: bool
    """Whether lhs is rounded stochastically."""

    precision: lax.PrecisionLike = None
    """Precision of the contraction, if it is one of floats."""

    rotation: config.Hadamard | None = None
    """Rotation of the operands of a gradient."""

    is_product: bool = False
    """Whether it stays in float because each sum has a single product."""

    is_smoothed: bool = False
    """Whether the operands were smoothed before."""

    is_rotated: bool = False
    """Whether the operands were rotated before."""

    @property
    def has_element_scales(self) -> bool:
        """Whether an operand has, or gets, a scale for each contracted element."""
        sides = self.lhs, self.rhs
        return any(one.scale_moves or one.tensor.scale_moves for one in sides)

    @property
    def has_blocks(self) -> bool:
        """Whether an operand is quantized in blocks."""
        return self.lhs.tensor.blocks is not None or self.rhs.tensor.blocks is not None


@dataclasses.dataclass(frozen=True)
class Execution:
    """The execution of a contraction, and what its gradients need to be resolved."""

    fwd: ContractionExecution
    cfg: config.DotGeneral
    """Config of the gradients."""

    structure: Any
    """Pytree structure of the operation."""

    lhs: _OperandType
    rhs: _OperandType
    differentiated: tuple[Side, ...] = ()
    """Operands with respect to which an enclosing differentiation differentiates."""

    def gradient(self, side: Side) -> ContractionExecution:
        """The execution of the contraction that gives the gradient of an operand."""
        own, other = (self.lhs, self.rhs) if side == "lhs" else (self.rhs, self.lhs)
        precision = self.fwd.precision
        return _gradient(self.cfg, self.structure, side, own, other, precision)

    def saves(self, side: Side) -> Saved:
        """The form in which an operand is saved for the gradient of the other one."""
        if side == "lhs":
            return _saved(self.cfg.fwd.lhs, self.cfg.drhs, self.lhs)
        return _saved(self.cfg.fwd.rhs, self.cfg.dlhs, self.rhs)


def resolve(
    cfg: config.DotGeneral,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    out_dtype: np.dtype,
    out_sharding: NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
) -> Execution:
    """Resolves a config for an operation and its operands.

    Args:
        cfg: what to quantize.
        operation: the contraction.
        lhs: an array, or a `QTensor` in place of one that the config quantizes.
        rhs: like `lhs`.
        out_dtype: dtype of the result.
        out_sharding: sharding of the result, on a mesh with explicit axes.
        precision: precision of contractions of floats, gradients included.

    Raises:
        ValueError: if ``calib_shared_axes`` names axes that an operand lacks, or if a
            `QTensor` has a scale per element of its contracting axes that cannot
            multiply the other operand.
    """
    structure, types = jax.tree.structure(operation), (_type_of(lhs), _type_of(rhs))
    out_dtype = np.dtype(out_dtype)
    return _resolve(cfg, structure, *types, out_dtype, out_sharding, precision)


@functools.lru_cache(maxsize=4096)
def _resolve(cfg, structure, lhs, rhs, out_dtype, out_sharding, precision) -> Execution:
    results = out_dtype, out_sharding, precision
    fwd = _contraction("fwd", cfg.fwd, cfg.fwd.rhs, None, *results)
    # Only the static fields of the operation matter here.
    operation = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    if operation.sums_one(rhs.shape):
        fwd = dataclasses.replace(fwd, is_product=True)
    lhs = _quantized_first(operation, "lhs", fwd.lhs, lhs)
    rhs = _quantized_first(operation, "rhs", fwd.rhs, rhs)
    if lhs.scale_shape is None and rhs.scale_shape is None:
        return Execution(fwd, cfg, structure, lhs, rhs)
    moves_lhs = _scale_moves(operation, "lhs", fwd.lhs, lhs, fwd.rhs, rhs)
    moves_rhs = _scale_moves(operation, "rhs", fwd.rhs, rhs, fwd.lhs, lhs)
    left, right = (
        dataclasses.replace(
            one, is_given=x.scale_shape is not None, scale_moves=is_moved
        )
        for one, x, is_moved in (
            (fwd.lhs, lhs, moves_lhs),
            (fwd.rhs, rhs, moves_rhs),
        )
    )
    fwd = dataclasses.replace(fwd, lhs=left, rhs=right)
    if moves_lhs or moves_rhs:
        lhs, rhs = (
            x._replace(
                dtype=exact.wide_dtype(x.dtype),
                scale_shape=(1,) * len(x.shape) if is_moved else None,
            )
            for x, is_moved in ((lhs, moves_lhs), (rhs, moves_rhs))
        )
    return Execution(fwd, cfg, structure, lhs, rhs)


def _quantized_first(
    operation: Operation, side: Side, one: OperandExecution, x: _OperandType
) -> _OperandType:
    """The type of an operand, as a `QTensor` if its scale is to multiply the other."""
    if not one.tensor.scale_moves or x.scale_shape is not None:
        return x
    layout = granularity.layout(one.tensor, x.shape, operation.axes(side), one.path)
    return x._replace(scale_shape=layout.scale_shape(x.shape))


def _scale_moves(
    operation: Operation,
    side: Side,
    one: OperandExecution,
    own: _OperandType,
    other_one: OperandExecution,
    other: _OperandType,
) -> bool:
    """Whether `own` is a `QTensor` with a scale that must move to the other operand.

    Raises:
        ValueError: if the scale varies along contracting axes and cannot move.
    """
    if own.scale_shape is None or not one.scales_output:
        return False
    axes = operation.axes(side)
    if not scale_moves.is_of_elements(own.shape, own.scale_shape, axes):
        return False
    obstacle = scale_moves.obstacle(
        operation, side, own.scale_shape, other.scale_shape, other_one.tensor
    )
    if obstacle is None:
        return True
    if one.tensor.blocks is not None:
        return False  # Contracted in tiles, as blocks of one element.
    what = "is a QTensor"
    remedy = (
        "Share the scale along the contracting axes, or give the result of .dequant()"
    )
    if one.tensor.scale_moves:
        what = f"has calib_shared_axes={one.tensor.calib_shared_axes!r} and is an array"
        remedy = f"Leave {one.path}.calib_shared_axes None"
    raise ValueError(
        f"{one.path} {what} of shape {own.shape} with a scale of shape "
        f"{own.scale_shape} that varies along the contracting axes "
        f"{axes.contracting}: it cannot be taken out of the sum, and would multiply "
        f"{other_one.path} before that is quantized, but {obstacle}. {remedy}"
    )


def resolve_gradient(
    gradient: ContractionExecution, operation: Operation, g: jax.Array, other: Operand
) -> Execution:
    """Resolves a gradient as a contraction with float gradients of its own.

    Args:
        gradient: ``execution.gradient(side)``.
        operation: ``operation.gradient(side)``.
        g: gradient of the output.
        other: the other operand.
    """
    structure = jax.tree.structure(operation)
    return Execution(gradient, _FLOAT, structure, _type_of(g), _type_of(other))


def _contraction(
    path: str,
    raw: config.DotGeneralRaw,
    rhs: config.Tensor,
    reuse: arithmetic.Reuse | None,
    out_dtype: np.dtype,
    out_sharding: NamedSharding | None,
    precision: lax.PrecisionLike,
) -> ContractionExecution:
    """Resolves one contraction.

    Args:
        path: path of the contraction's config: "fwd", "dlhs" or "drhs".
        raw: config of the contraction.
        rhs: config of rhs, in a gradient perhaps the one of the forward pass.
        reuse: reuse of rhs.
        out_dtype: dtype of the result.
        out_sharding: sharding of the result.
        precision: precision of the contraction, if it is one of floats.
    """
    accumulator = raw.dg_accumulator_dtype
    if accumulator is not None and not jnp.issubdtype(accumulator, jnp.floating):
        accumulator = None  # Sums of integers are int32 anyway.
    forms = arithmetic.forms_of(raw.lhs, rhs, raw.dg_in_dtype)
    tensors = raw.lhs, rhs
    if raw.local_aqt is not None:
        count = raw.local_aqt.contraction_axis_shard_count
        blocks = granularity.LocalBlocks(count=count)
        left, right = (
            dataclasses.replace(one, blocks=blocks) if one.is_quantized else one
            for one in tensors
        )
        tensors = left, right
    lhs_execution, rhs_execution = (
        OperandExecution(
            path=f"{path}.{side}",
            tensor=tensor,
            form=form,
            salt=_PATHS.index(f"{path}.{side}"),
        )
        for side, tensor, form in zip(SIDES, tensors, forms, strict=True)
    )
    return ContractionExecution(
        path=path,
        lhs=lhs_execution,
        rhs=dataclasses.replace(rhs_execution, reuse=reuse),
        kind=arithmetic.kind_of(*forms, raw.dg_in_dtype),
        in_dtype=raw.dg_in_dtype,
        accumulator=accumulator,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        needs_noise=raw.lhs.needs_noise,
        precision=precision,
        rotation=None if path == "fwd" else raw.rotation,
        is_smoothed=raw.smoothing is not None,
        is_rotated=raw.rotation is not None,
    )


def _saved(
    tensor: config.Tensor, backward: config.DotGeneralRaw, x: _OperandType
) -> Saved:
    is_reused = tensor.is_quantized and backward.rhs.use_fwd_quant
    return "quantized" if is_reused or x.scale_shape is not None else "float"


@functools.lru_cache(maxsize=4096)
def _gradient(
    cfg: config.DotGeneral,
    structure: Any,
    side: Side,
    own: _OperandType,
    other: _OperandType,
    precision: lax.PrecisionLike,
) -> ContractionExecution:
    """Resolves the contraction that gives the gradient of `own`."""
    operation = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    other_side: Side
    if side == "lhs":
        path, raw, forward, other_side = "dlhs", cfg.dlhs, cfg.fwd.rhs, "rhs"
    else:
        path, raw, forward, other_side = "drhs", cfg.drhs, cfg.fwd.lhs, "lhs"
    is_reused = _saved(forward, raw, other) == "quantized"
    of_gradient = operation.gradient(side)
    is_product = of_gradient.sums_nothing or of_gradient.sums_one(other.shape)
    if is_product:
        # A scale of a single element loses it, and saves nothing.
        raw = config.DotGeneralRaw()
    reuse, tensor = None, raw.rhs
    if is_reused:
        scale_shape = other.scale_shape
        if scale_shape is None:
            layout = granularity.layout(
                forward,
                other.shape,
                operation.axes(other_side),
                f"fwd.{other_side}",
            )
            scale_shape = layout.scale_shape(other.shape)
        moves = of_gradient.rhs_scale_moves(scale_shape)
        reuse, tensor = arithmetic.reused(raw, forward, scale_moves=moves)
    results = own.dtype, own.sharding, precision
    how = _contraction(path, raw, tensor, reuse, *results)
    return dataclasses.replace(how, is_product=is_product)

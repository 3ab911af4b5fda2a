"""The sums of products of 8-bit floats in blocks, in the form for each platform.

CPUs contract the dequantized operands in float32. `block_forms` decides what
other platforms do; the products are the same, and the order of their sums is another.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config, numerics
from aqtlite.calibration import scale_grids
from aqtlite.config.arithmetic import Form, Kind
from aqtlite.contraction import accumulation, dots
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.contraction.sum_of_products import SumOfProducts
from aqtlite.lowering.forms import block_forms, block_scaled
from aqtlite.lowering.forms.block_forms import BlockType
from aqtlite.lowering.target import Target
from aqtlite.operations import DotInput, Operation, Side
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes import block_shapes

_E8M0 = np.dtype(jnp.float8_e8m0fnu)


def sum_products(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> jax.Array:
    """Contracts two operands as `accumulation.sum_products`, those in blocks by target.

    Returns:
        The sums; scaled, in float32 or float64, of 8-bit floats with a scale per block.
    """
    if how.kind != "in blocks" or lhs_q is None or rhs_q is None:
        return accumulation.sum_products(how, operation, lhs, rhs, lhs_q, rhs_q)
    return _InBlocks.of(how, operation, lhs, rhs, lhs_q, rhs_q)


class _InBlocks(SumOfProducts):
    """The sums of products of two operands in blocks."""

    @property
    def sums_floats(self):
        return True

    def reference(self, *leaves):
        operation, _, both = self.operands(*leaves)
        how = as_floats(self.how)
        return accumulation.sum_products(how, operation, *both, *both)

    def lowered(self, target, *leaves):
        operation, _, (lhs, rhs) = self.operands(*leaves)
        form = form_of(target, self.how, operation, lhs, rhs)
        if form == "float32":
            return self.reference(*leaves)
        # As everywhere on these platforms, operands are alike given or computed.
        lhs, rhs = lax.optimization_barrier((lhs, rhs))
        if form == "by block":
            how = _with_forms(self.how, "narrow", "narrow")
            sums = accumulation.sum_products(how, operation, lhs, rhs, lhs, rhs)
            return accumulation.scaled(how, operation, sums, lhs, rhs)
        if form == "bfloat16":
            sums, numbers = _in_bfloat16(self.how, operation, lhs, rhs)
        else:
            sums, numbers = _block_scaled(self.how, operation, lhs, rhs)
        for number in numbers:
            sums = sums * number
        accumulator = self.how.accumulator
        return sums if accumulator is None else sums.astype(accumulator)


def form_of(
    target: Target,
    how: ContractionExecution,
    operation: Operation,
    lhs: QTensor,
    rhs: QTensor,
) -> block_forms.Form:
    """Returns the form in which a target contracts two operands in blocks."""
    sizes = (*lhs.qvalue.shape, *rhs.qvalue.shape)
    is_wide = np.float64 in (lhs.dtype, rhs.dtype)
    if is_wide or lhs.padding or rhs.padding or 0 in sizes:
        return "float32"
    types = _types(how, operation, lhs, rhs)
    is_dot = isinstance(operation, DotGeneral) and how.out_sharding is None
    return block_forms.form_of(target, *types, is_dot=is_dot)


def _types(
    how: ContractionExecution, operation: Operation, lhs: QTensor, rhs: QTensor
) -> tuple[BlockType, BlockType]:
    return (
        _type_of(how.lhs.tensor, operation, "lhs", lhs),
        _type_of(how.rhs.tensor, operation, "rhs", rhs),
    )


def _type_of(
    tensor: config.Tensor, operation: Operation, side: Side, q: QTensor
) -> BlockType:
    grid = tensor.grid
    if not isinstance(grid, numerics.Float):
        raise TypeError(f"blocks of {type(grid).__name__} are no blocks of floats")
    cuttable = operation.axes(side).cuttable
    size = 1
    if cuttable:
        size = q.qvalue.shape[cuttable[-1]] // q.scale.shape[cuttable[-1]]
    dtype = _E8M0 if tensor.po2_scale else tensor.scale_dtype
    return BlockType(grid.mantissa_bits, grid.smallest, grid.bound, dtype, size)


def as_floats(how: ContractionExecution) -> ContractionExecution:
    """The execution with dequantized operands in place of those in blocks."""
    is_in_blocks = how.kind == "in blocks"
    return _with_forms(how, "float", "dequantized") if is_in_blocks else how


def _with_forms(
    how: ContractionExecution, kind: Kind, form: Form
) -> ContractionExecution:
    left, right = (dataclasses.replace(one, form=form) for one in (how.lhs, how.rhs))
    return dataclasses.replace(how, kind=kind, lhs=left, rhs=right)


def _in_bfloat16(
    how: ContractionExecution, operation: Operation, lhs: QTensor, rhs: QTensor
) -> tuple[jax.Array, list[jax.Array]]:
    """Contracts scaled values in bfloat16, and returns numbers that multiply the sums.

    The values times their scales are exact; numbers that several scales share are not
    among them.
    """
    numbers, inputs = [], []
    for side, q, tensor in _sides(how, lhs, rhs):
        scale, number = _split_scale(operation, side, q, tensor)
        numbers += number
        scale = block_shapes.repeat(scale, q.qvalue.shape, range(q.qvalue.ndim))
        values = q.qvalue.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
        inputs.append(DotInput(lax.optimization_barrier(values)))
    plain = dataclasses.replace(_with_forms(how, "float", "float"), accumulator=None)
    sums = dots.dot(plain, operation, *inputs)
    return sums, numbers


def _block_scaled(
    how: ContractionExecution, operation: DotGeneral, lhs: QTensor, rhs: QTensor
) -> tuple[jax.Array, list[jax.Array]]:
    """Contracts stored values and their scales, and returns numbers like the above."""
    codes = block_forms.codes_of(*_types(how, operation, lhs, rhs))
    if codes is None:
        raise TypeError("no block-scaled product takes operands of these types")
    numbers, values, scales = [], [], []
    for side, q, tensor in _sides(how, lhs, rhs):
        scale, number = _split_scale(operation, side, q, tensor)
        numbers += number
        axes = operation.axes(side)
        kept = axes.batch + axes.remaining
        scale = block_shapes.repeat(scale, q.qvalue.shape, kept)
        values.append(q.qvalue.astype(codes.lhs if side == "lhs" else codes.rhs))
        scales.append(scale.astype(codes.scale))
    (left, right), (left_scale, right_scale) = values, scales
    sums = block_scaled.dot(left, right, left_scale, right_scale, operation.dims)
    return operation.ordered(sums), numbers


def _sides(
    how: ContractionExecution, lhs: QTensor, rhs: QTensor
) -> tuple[tuple[Side, QTensor, config.Tensor], ...]:
    return ("lhs", lhs, how.lhs.tensor), ("rhs", rhs, how.rhs.tensor)


def _split_scale(
    operation: Operation, side: Side, q: QTensor, tensor: config.Tensor
) -> tuple[jax.Array, list[jax.Array]]:
    """Splits scales into values of their dtype and numbers, laid out as the sums are.

    Powers of two are returned as they are, without numbers.
    """
    dtype = tensor.scale_dtype
    if dtype is None or dtype.name not in scale_grids.RELATIVE_DTYPES:
        return q.scale, []
    shared = None
    if tensor.scale_shared_axes is None:
        shared = operation.axes(side).contracting
    scale, number = scale_grids.factored(q.scale, dtype, shared)
    number = dots.of_elements(operation, side, number, q.qvalue.shape)
    return scale, [operation.scale_to_output(side, number)]

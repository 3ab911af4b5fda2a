"""The sums of products of small floats in blocks, as integers by a kernel of CPUs.

Floats of four bits, and those of six with three bits of mantissa, are multiples of a
unit that int8 holds. In blocks, they are contracted with others, or with wider floats,
as int8 in blocks are (`tiles`): the sums of a block are exact. Where no kernel is
installed, and on other platforms, they are contracted as any floats in blocks, and the
sums are rounded otherwise.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import numerics
from aqtlite.config.arithmetic import Form
from aqtlite.contraction import tiles
from aqtlite.contraction.execution import ContractionExecution, OperandExecution
from aqtlite.contraction.float_kernel import FloatKernel, is_of_matrices, may_take
from aqtlite.lowering.forms import narrow, panel_products
from aqtlite.lowering.forms.weight_coding import MAGNITUDES, Coding
from aqtlite.operations import DotInput, Operation
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.qtensor.transposed_values import TransposedValues
from aqtlite.shapes.dimension_numbers import Axes


def takes(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor,
) -> bool:
    """Returns True if `Sums` contracts two operands.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand.
        lhs_q: lhs quantized, None if it stays in floating point.
        rhs_q: rhs quantized.
    """
    if not may_take(how, operation):
        return False
    if not _is_in_units(how.rhs, rhs_q) or 0 in lhs.shape:
        return False
    is_float = lhs_q is None and lhs.dtype in tiles.FLOATS
    if not is_float and (lhs_q is None or not _is_in_units(how.lhs, lhs_q)):
        return False
    counts = tiles.counts(_with_integers(how), operation, lhs_q, rhs_q)
    contracting = operation.axes("rhs").contracting
    tile = math.prod(rhs_q.shape[axis] for axis in contracting) // math.prod(counts)
    return _is_read(rhs_q, contracting, tile) and panel_products.runs_here()


def reads_rhs(operation: Operation, rhs: QTensor) -> bool:
    """Returns True if the kernel reads rhs, stored with contracting axes last.

    Args:
        operation: the contraction.
        rhs: rhs quantized.
    """
    contracting = operation.axes("rhs").contracting
    return is_of_matrices(operation) and reads(rhs, contracting)


def reads(weight: QTensor, contracting: Axes) -> bool:
    """Returns True if the kernel reads a weight of matrices.

    Args:
        weight: the weight quantized.
        contracting: its contracting axes.
    """
    tile = math.prod(weight.blocks[axis] for axis in contracting)
    is_whole = weight.padding is None and _has_units(weight.numerics)
    return is_whole and _is_read(weight, contracting, tile)


def _is_read(rhs: QTensor, contracting: Axes, tile: int) -> bool:
    """Whether the kernel reads tiles of an operand."""
    products = math.prod(rhs.shape[axis] for axis in contracting)
    columns = math.prod(rhs.shape) // max(products, 1)
    return tile < products and panel_products.reads(columns, tile, 8)


def _is_in_units(one: OperandExecution, q: QTensor) -> bool:
    """Whether an operand in blocks is contracted as multiples of a unit."""
    is_form = one.form in ("in blocks", "dequantized") and not one.tensor.use_fake_quant
    has_blocks = one.tensor.blocks is not None and q.padding is None
    is_narrow = q.dtype != np.float64
    return is_form and has_blocks and is_narrow and _has_units(q.numerics)


def _has_units(grid: numerics.Numerics | None) -> bool:
    """Whether int8 holds the values of a grid as multiples of the smallest."""
    if not isinstance(grid, numerics.Float):
        return False
    return narrow.fits_int8(grid.bound / grid.smallest)


class Sums(FloatKernel):
    """The sums of products of two operands, of which one or both are in units."""

    def lowered(self, target, *leaves):
        if target.platform != "cpu":
            return self.reference(*leaves)
        operation, (lhs, _), (lhs_q, rhs_q) = self.operands(*leaves)
        how, left = _with_integers(self.how), DotInput(lhs)
        if lhs_q is not None:
            left, lhs_q = _integers(lhs_q)
        counts = tiles.counts(how, operation, lhs_q, rhs_q)
        is_stored = isinstance(rhs_q.qvalue, TransposedValues)
        if is_stored and panel_products.is_available(target):
            out = _as_stored(how, counts, operation, (left, lhs_q), rhs_q)
            if out is not None:
                return out
        right = _integers(rhs_q.unpacked())
        return tiles.sum_products(how, operation, counts, (left, lhs_q), right)


def _as_stored(
    how: ContractionExecution,
    counts: tuple[int, ...],
    operation: DotGeneral,
    lhs: tuple[DotInput, QTensor | None],
    rhs_q: QTensor,
) -> jax.Array | None:
    """Contracts with rhs as it is stored, by the kernel; None if it does not suit.

    Args:
        how: execution of the contraction of integers.
        counts: number of tiles of each contracting axis.
        operation: the contraction.
        lhs: input to the dot, and the quantized operand if there is one.
        rhs_q: rhs quantized, of `TransposedValues`.
    """
    rhs = rhs_q.qvalue
    stored = operation.in_storage("rhs", rhs.axes)
    if stored is None or stored.axes("rhs").contracting[-1] != len(rhs.axes) - 1:
        return None
    grid, values, coding = _of_units(rhs.grid), rhs.values, Coding.E2M1
    multiples = tuple(value / grid.smallest for value in grid.magnitudes)
    if values.dtype != jnp.int4 or multiples != MAGNITUDES:
        values, coding = narrow.in_units(rhs.on_grid(), grid.smallest), Coding.INTEGERS
    right = DotInput(rhs), _with_scale_of_units(rhs_q)
    *given, _, zero_point, scale = tiles.given_of(how, operation, lhs, right)
    given += [values, zero_point, scale.transpose(np.argsort(rhs.axes))]
    return tiles.by_kernel(how, counts, stored, given, coding)


def _integers(q: QTensor) -> tuple[DotInput, QTensor]:
    """The integers of an operand, and the operand with the scale of these."""
    grid = _of_units(q.numerics)
    values = narrow.in_units(q.qvalue, grid.smallest)
    q = dataclasses.replace(_with_scale_of_units(q), qvalue=values)
    return DotInput(values, None, int(grid.bound / grid.smallest)), q


def _with_scale_of_units(q: QTensor) -> QTensor:
    """An operand with the scale of its integers."""
    unit = np.float32(_of_units(q.numerics).smallest)
    return dataclasses.replace(q, scale=q.scale * unit)


def _of_units(grid: numerics.Numerics | None) -> numerics.Float:
    if not isinstance(grid, numerics.Float):
        raise TypeError(f"{grid!r} is no grid of multiples of a unit")
    return grid


def _with_integers(how: ContractionExecution) -> ContractionExecution:
    """The execution with integers in place of operands in blocks."""
    lhs: Form = "float" if how.lhs.form == "float" else "stored"
    return dataclasses.replace(
        how,
        kind="mixed" if lhs == "float" else "integers",
        lhs=dataclasses.replace(how.lhs, form=lhs),
        rhs=dataclasses.replace(how.rhs, form="stored"),
    )

"""The sums of products of small floats in blocks, as integers by a kernel of CPUs.

Floats of four bits, and those of six with three bits of mantissa, are multiples of a
unit that int8 holds. In blocks, they are contracted with others, or with wider floats,
as int8 in blocks are (`tiles`): the sums of a block are exact. Where no kernel is
installed, and on other platforms, they are contracted as any floats in blocks, and the
sums are rounded otherwise.
"""

import dataclasses
import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import numerics
from aqtlite.config.arithmetic import Form
from aqtlite.contraction import accumulation, block_products, tiles
from aqtlite.contraction.execution import ContractionExecution, OperandExecution
from aqtlite.lowering.forms import narrow, panel_products
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import DotInput, Operation
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes.sharding import explicit_sharding

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def takes(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> bool:
    """Returns True if `sum_products` contracts two operands.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand.
        lhs_q: lhs quantized, None if it stays in floating point.
        rhs_q: rhs quantized, likewise.
    """
    is_matrix = isinstance(operation, DotGeneral) and not operation.dims[1][0]
    is_plain = how.accumulator is None and how.in_dtype is how.out_sharding is None
    if how.is_product or not (is_matrix and is_plain):
        return False
    if rhs_q is None or not _is_in_units(how.rhs, rhs_q) or 0 in lhs.shape:
        return False
    if lhs_q is None:
        if lhs.dtype not in _FLOATS or explicit_sharding(lhs) is not None:
            return False
    elif not _is_in_units(how.lhs, lhs_q):
        return False
    counts = tiles.counts(_with_integers(how), operation, lhs_q, rhs_q)
    contracting, _, remaining, *_ = operation.axes("rhs")
    products, columns = (
        math.prod(rhs_q.qvalue.shape[axis] for axis in axes)
        for axes in (contracting, remaining)
    )
    count = math.prod(counts)
    return count > 1 and panel_products.reads_here(columns, products // count, 8)


def _is_in_units(one: OperandExecution, q: QTensor) -> bool:
    """Whether an operand in blocks is contracted as multiples of a unit."""
    is_form = one.form in ("in blocks", "dequantized") and not one.tensor.use_fake_quant
    has_blocks = one.tensor.blocks is not None and not q.padding
    is_narrow = q.dtype != np.float64 and explicit_sharding(q.scale) is None
    return is_form and has_blocks and is_narrow and _has_units(q.numerics)


def _has_units(grid: numerics.Numerics | None) -> TypeGuard[numerics.Float]:
    """Whether int8 holds the values of a grid as multiples of the smallest."""
    is_float = isinstance(grid, numerics.Float)
    return is_float and grid.bound / grid.smallest <= narrow.LARGEST_INT8


def sum_products(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor,
) -> jax.Array:
    """Contracts two operands that `takes` takes.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand, not read if it is quantized.
        lhs_q: lhs quantized, None if it stays in floating point.
        rhs_q: rhs quantized; its values may be codes (`stored_values.to_save`).

    Returns:
        The scaled sums, float32.
    """
    values = lhs if lhs_q is None else lhs_q.qvalue
    others = [
        None
        if q is None
        else dataclasses.replace(q, qvalue=None, unrounded=None, sums=None)
        for q in (lhs_q, rhs_q)
    ]
    leaves, structure = jax.tree.flatten((operation, others))
    return _SumOfProducts(how, structure)(values, rhs_q.qvalue, *leaves)


@dataclasses.dataclass(frozen=True)
class _SumOfProducts(TargetDependent):
    """The sums of products of two operands, of which one or both are in units."""

    is_composite = True

    how: ContractionExecution
    structure: Any
    """Pytree structure of the arguments after the values of lhs and rhs, which come
    first to be seen as its operands: the operation, and the rest of both."""

    def reference(self, lhs, rhs, *leaves):
        operation, (lhs_q, rhs_q) = jax.tree.unflatten(self.structure, leaves)
        rhs_q = _with_values(rhs_q, rhs)
        if lhs_q is None:
            return accumulation.sum_products(
                self.how, operation, lhs, rhs_q, None, rhs_q
            )
        lhs_q = _with_values(lhs_q, lhs)
        return block_products.sum_products(self.how, operation, lhs_q, rhs_q)

    def lowered(self, target, lhs, rhs, *leaves):
        if target.platform != "cpu":
            return self.reference(lhs, rhs, *leaves)
        operation, (lhs_q, rhs_q) = jax.tree.unflatten(self.structure, leaves)
        how = _with_integers(self.how)
        left, lhs_q = DotInput(lhs), lhs_q
        if lhs_q is not None:
            left, lhs_q = _integers(_with_values(lhs_q, lhs))
        right, rhs_q = _integers(_with_values(rhs_q, rhs))
        counts = tiles.counts(how, operation, lhs_q, rhs_q)
        return tiles.sum_products(how, operation, counts, (left, lhs_q), (right, rhs_q))


def _with_values(q: QTensor, values: jax.Array) -> QTensor:
    return dataclasses.replace(q, qvalue=values).on_grid()


def _integers(q: QTensor) -> tuple[DotInput, QTensor]:
    """The integers of an operand, and the operand with the scale of these."""
    grid = q.numerics
    if not _has_units(grid):
        raise TypeError(f"{grid!r} is no grid of small multiples of a unit")
    values = narrow.in_units(q.qvalue, grid.smallest)
    scale = q.scale * np.float32(grid.smallest)
    largest = int(grid.bound / grid.smallest)
    return DotInput(values, None, largest), dataclasses.replace(
        q, qvalue=values, scale=scale
    )


def _with_integers(how: ContractionExecution) -> ContractionExecution:
    """The execution with integers in place of operands in blocks."""
    lhs: Form = "float" if how.lhs.form == "float" else "stored"
    return dataclasses.replace(
        how,
        kind="mixed" if lhs == "float" else "integers",
        lhs=dataclasses.replace(how.lhs, form=lhs),
        rhs=dataclasses.replace(how.rhs, form="stored"),
    )

"""The sums of products with an operand whose values are packed for a kernel.

The kernel reads them where it is available and takes the contraction; elsewhere they
are unpacked in the program, and contracted as any others. The sums are the same.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.contraction import accumulation, plane_sums, tiles
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.contraction.sum_of_products import SumOfProducts, with_values
from aqtlite.lowering import Dot, Integers
from aqtlite.lowering.forms import packed_dot, panel_products, scaled_panel_products
from aqtlite.lowering.target import Target
from aqtlite.operations import DotInput, Operation
from aqtlite.operations.base import zero_points_leave_sums
from aqtlite.qtensor.laid_out import PackedIntegers
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import Operand, QTensor


def is_packed(q: QTensor | None) -> bool:
    """Whether the values of an operand are packed."""
    return q is not None and _is_packed(q.qvalue)


def sum_products(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> jax.Array:
    """Contracts two operands of which one is packed, as `accumulation.sum_products`."""
    return _OfPacked.of(how, operation, lhs, rhs, lhs_q, rhs_q)


class _OfPacked(SumOfProducts):
    """The sums of products of two operands of which one is packed."""

    def reference(self, *leaves):
        operation, values, quantized = self.operands(*leaves)
        arrays = [x.integers() if _is_packed(x) else x for x in values]
        both = map(with_values, quantized, arrays)
        return accumulation.sum_products(self.how, operation, *arrays, *both)

    def lowered(self, target, *leaves):
        operation, (lhs, rhs), (lhs_q, rhs_q) = self.operands(*leaves)
        sums = None
        is_rhs = _is_packed(rhs) and not _is_packed(lhs)
        if is_rhs and _may_call(target, self.how, operation, lhs):
            is_weight = isinstance(rhs, PackedValues)
            by_kernel = _of_weights if is_weight else plane_sums.by_kernel
            sums = by_kernel(self.how, operation, (lhs, lhs_q), rhs_q)
        return self.reference(*leaves) if sums is None else sums


def _is_packed(values: Any) -> bool:
    return isinstance(values, PackedIntegers)


def _may_call(
    target: Target, how: ContractionExecution, operation: Operation, lhs: jax.Array
) -> bool:
    """Whether there are kernels, and they sum as they are asked."""
    is_plain = how.accumulator is None and how.out_sharding is None
    if not isinstance(operation, Dot) or not is_plain or 0 in lhs.shape:
        return False
    return panel_products.is_available(target)


def _of_weights(
    how: ContractionExecution,
    operation: Any,
    lhs: tuple[Operand, QTensor | None],
    rhs_q: Any,
) -> jax.Array | None:
    """Sums by the kernel of weights; None if other forms take less time, or it lacks
    the kind.

    Args:
        how: execution of the contraction.
        operation: a `Dot`.
        lhs: left operand, and that quantized.
        rhs_q: right operand, of `PackedValues`.
    """
    ranks = lhs[0].ndim, rhs_q.ndim
    last = tuple(tuple(range(n - rhs_q.qvalue.contracted, n)) for n in ranks)
    if operation.dims != (last, ((), ())):
        return None
    left = accumulation.dot_input(how, operation, "lhs", *lhs)
    right = accumulation.dot_input(how, operation, "rhs", rhs_q, rhs_q)
    counts = tiles.counts(how, operation, lhs[1], rhs_q) if how.has_blocks else ()
    if math.prod(counts) > 1:
        given = tiles.given_of(how, operation, (left, lhs[1]), (right, rhs_q))
        return tiles.by_kernel(how, counts, operation, given)
    values, dtype = rhs_q.qvalue, left.values.dtype
    rows = math.prod(left.values.shape[: -values.contracted])
    if how.kind == "mixed":
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return _of_floats(operation, left, values, how.out_dtype) if is_float else None
    are_integers = dtype in (jnp.int4, jnp.int8)
    if not are_integers or not packed_dot.pays_in_panels(rows, values.dtype):
        return None
    if not _sums_less_zero_points(how, operation, left, right):
        return None
    sums: jax.Array = operation.contract(_ByKernel(), left, right)
    return sums if how.kind == "integers" else sums.astype(jnp.float32)


def _sums_less_zero_points(
    how: ContractionExecution, operation: Dot, left: DotInput, right: DotInput
) -> bool:
    """Whether integers are summed whose zero points are subtracted from the sums."""
    if left.zero_point is None:
        return how.kind in ("integers", "integers in float")
    # The sums of the weight are part of what is subtracted.
    products = operation.products(left.values.shape, right.values.shape)
    leaves_sums = zero_points_leave_sums(_ByKernel(), left, right, products)
    contracted = operation.dims[0][0]
    is_shared = all(left.zero_point.shape[axis] == 1 for axis in contracted)
    has_sums = leaves_sums and is_shared and right.sums is not None
    return how.kind == "integers" and has_sums


@dataclasses.dataclass(frozen=True)
class _ByKernel(Integers):
    """Stored integers by packed ones, summed by the kernel to int32."""

    def __call__(self, contraction, lhs, rhs):
        weights = rhs.values.matrix
        x = lhs.values.reshape(-1, weights.products)
        out = panel_products.of_matrices(
            x, weights.values, weights.columns, weights.bits
        )
        return _as_result(contraction, lhs, rhs.values, out)


def _of_floats(
    operation: Dot, lhs: DotInput, values: PackedValues, out_dtype: np.dtype
) -> jax.Array:
    weights = values.matrix
    scales = jnp.ones((weights.columns, 1), jnp.float32)
    x = lhs.values.reshape(-1, weights.products)
    out = scaled_panel_products.of_floats(x, weights, scales, out_dtype)
    return _as_result(operation, lhs, values, out)


def _as_result(
    operation: Dot, lhs: DotInput, values: PackedValues, out: jax.Array
) -> jax.Array:
    """Lays out sums of rows and columns as the result of a contraction."""
    rows, columns = (x.shape[: -values.contracted] for x in (lhs.values, values))
    return operation.ordered(out.reshape(*rows, *columns))

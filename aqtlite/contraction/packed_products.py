"""The sums of products with a weight whose values are packed for a kernel.

The kernel reads them where it is available and takes the contraction; elsewhere they
are unpacked in the program, and contracted as any others. The sums are the same.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.contraction import accumulation, tiles
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import Dot, Integers
from aqtlite.lowering.forms import packed_dot, panel_products
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.operations import DotInput, Operation
from aqtlite.operations.base import zero_points_leave_sums
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import Operand, QTensor


def is_packed(q: QTensor | None) -> bool:
    """Whether the values of an operand are packed."""
    return q is not None and isinstance(q.qvalue, PackedValues)


def sum_products(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> jax.Array:
    """Contracts two operands of which one is packed, as `accumulation.sum_products`."""
    floats = lhs if lhs_q is None else None, rhs if rhs_q is None else None
    operands = [q and dataclasses.replace(q, unrounded=None) for q in (lhs_q, rhs_q)]
    leaves, structure = jax.tree.flatten((operation, *floats, *operands))
    return _SumOfProducts(how, structure)(*leaves)


@dataclasses.dataclass(frozen=True)
class _SumOfProducts(TargetDependent):
    """The sums of products of two operands of which one is packed."""

    is_composite = True

    how: ContractionExecution
    structure: Any
    """Pytree structure of the arguments of `accumulation.sum_products`."""

    def reference(self, *leaves):
        operation, lhs, rhs, *operands = jax.tree.unflatten(self.structure, leaves)
        lhs_q, rhs_q = map(_with_integers, operands)
        return accumulation.sum_products(self.how, operation, lhs, rhs, lhs_q, rhs_q)

    def lowered(self, target, *leaves):
        operation, lhs, _, lhs_q, rhs_q = jax.tree.unflatten(self.structure, leaves)
        sums = None
        if is_packed(rhs_q) and not is_packed(lhs_q):
            sums = _by_kernel(target, self.how, operation, lhs, lhs_q, rhs_q)
        return self.reference(*leaves) if sums is None else sums


def _with_integers(q: QTensor | None) -> QTensor | None:
    if q is None or not isinstance(q.qvalue, PackedValues):
        return q
    return dataclasses.replace(q, qvalue=q.qvalue.integers())


def _by_kernel(
    target: Target,
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor,
) -> jax.Array | None:
    """The sums as the kernel computes them; None if it does not take the operands."""
    is_plain = how.accumulator is None and how.out_sharding is None
    if not panel_products.is_available(target) or not is_plain:
        return None
    left = accumulation.dot_input(how, operation, "lhs", lhs, lhs_q)
    if not isinstance(operation, Dot) or not _contracts_last(
        operation, left.values.shape, rhs_q.qvalue
    ):
        return None
    right = accumulation.dot_input(how, operation, "rhs", rhs_q, rhs_q)
    counts = tiles.counts(how, operation, lhs_q, rhs_q) if how.has_blocks else ()
    if math.prod(counts) > 1:
        given = tiles.given_of(how, operation, (left, lhs_q), (right, rhs_q))
        return tiles.by_kernel(target, how, counts, operation, given)
    values = rhs_q.qvalue
    rows = math.prod(left.values.shape[: -values.contracted])
    if how.kind == "mixed":
        is_float = jnp.issubdtype(left.values.dtype, jnp.floating)
        suits = is_float and panel_products.has_fast_floats(rows, values.dtype)
        return _of_floats(operation, left, values, how.out_dtype) if suits else None
    if not _suits_integers(how, operation, left, right) or not (
        packed_dot.reads_panels(rows, values.dtype)
    ):
        return None
    sums = operation.contract(_ByKernel(), left, right)
    return sums if how.kind == "integers" else sums.astype(jnp.float32)


def _contracts_last(
    operation: Dot, lhs_shape: tuple[int, ...], values: PackedValues
) -> bool:
    """Whether the last axes of lhs are contracted with those that are packed."""
    ranks = len(lhs_shape), values.ndim
    last = tuple(tuple(range(n - values.contracted, n)) for n in ranks)
    return operation.dims == (last, ((), ())) and 0 not in lhs_shape


def _suits_integers(
    how: ContractionExecution, operation: Operation, left: DotInput, right: DotInput
) -> bool:
    """Whether the kernel sums products of integers, less their zero points."""
    kinds = "integers", "integers in float"
    if how.kind not in kinds or left.values.dtype not in (jnp.int4, jnp.int8):
        return False
    if left.zero_point is None:
        return True
    # The sums of the weight are part of it.
    products = operation.products(left.values.shape, right.values.shape)
    leaves_sums = zero_points_leave_sums(_ByKernel(), left, right, products)
    axes = operation.axes("lhs").contracting
    is_shared = all(left.zero_point.shape[axis] == 1 for axis in axes)
    return (
        how.kind == "integers" and leaves_sums and is_shared and right.sums is not None
    )


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
    out = panel_products.scaled_sums_of_floats(x, weights, scales, out_dtype)
    return _as_result(operation, lhs, values, out)


def _as_result(
    operation: Dot, lhs: DotInput, values: PackedValues, out: jax.Array
) -> jax.Array:
    """Lays out sums of rows and columns as the result of a contraction."""
    rows, columns = (x.shape[: -values.contracted] for x in (lhs.values, values))
    out = out.reshape(*rows, *columns)
    return out if operation.order is None else out.transpose(operation.order)

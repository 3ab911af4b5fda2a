"""A contraction of floats for which CPUs may have a kernel."""

import dataclasses
from typing import Any, TypeGuard

import jax

from aqtlite.contraction import block_products
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import Operation
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor


def suits(how: ContractionExecution, operation: Operation) -> bool:
    """Returns True if kernels of floats may take a contraction, by its operands."""
    is_plain = how.accumulator is None and how.in_dtype is None and not how.is_product
    return is_plain and is_of_matrices(operation)


def is_of_matrices(operation: Operation) -> TypeGuard[DotGeneral]:
    """Returns True if a contraction is a product of matrices, without batch axes."""
    return isinstance(operation, DotGeneral) and operation.dims[1] == ((), ())


@dataclasses.dataclass(frozen=True)
class FloatKernel(TargetDependent):
    """The sums of products of two operands of floats, of which rhs is quantized.

    Subclasses lower it to a kernel; the reference has no kernel, and sums are rounded
    otherwise there.
    """

    is_composite = True

    how: ContractionExecution
    structure: Any
    """Pytree structure of the arguments: the values of lhs and rhs, which come first to
    be seen as its operands, the operation, and the rest of both."""

    @classmethod
    def sum_products(
        cls,
        how: ContractionExecution,
        operation: Operation,
        lhs: Operand,
        lhs_q: QTensor | None,
        rhs_q: QTensor,
    ) -> jax.Array:
        """Contracts two operands, like `block_products.sum_products`.

        Args:
            how: execution of the contraction.
            operation: the contraction.
            lhs: left operand, not read if it is quantized.
            lhs_q: lhs quantized, None if it stays in floating point.
            rhs_q: rhs quantized; its values may be `TransposedValues`.
        """
        values = lhs if lhs_q is None else lhs_q.qvalue, rhs_q.qvalue
        others = [
            q if q is None else dataclasses.replace(q, qvalue=None, unrounded=None)
            for q in (lhs_q, rhs_q)
        ]
        leaves, structure = jax.tree.flatten((values, operation, others))
        return cls(how, structure)(*leaves)

    @property
    def sums_floats(self):
        return True

    def reference(self, *leaves):
        operation, lhs, lhs_q, rhs_q = self._of(*leaves)
        rhs = rhs_q.unpacked()
        return block_products.sum_products(self.how, operation, lhs, rhs, lhs_q, rhs)

    def _of(self, *leaves):
        """The operation, lhs, lhs quantized and rhs quantized."""
        (lhs, rhs), operation, (lhs_q, rhs_q) = jax.tree.unflatten(
            self.structure, leaves
        )
        if lhs_q is not None:
            lhs_q = dataclasses.replace(lhs_q, qvalue=lhs)
        return operation, lhs, lhs_q, dataclasses.replace(rhs_q, qvalue=rhs)

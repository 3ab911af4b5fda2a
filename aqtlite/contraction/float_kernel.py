"""A contraction of floats for which CPUs may have a kernel."""

from typing import TypeGuard

from aqtlite.contraction import block_products
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.contraction.sum_of_products import SumOfProducts
from aqtlite.operations import Operation
from aqtlite.operations.dot_general import DotGeneral


def may_take(how: ContractionExecution, operation: Operation) -> bool:
    """Returns True if kernels of floats may take a contraction, by its operands."""
    is_plain = how.accumulator is None and how.in_dtype is None and not how.is_product
    return is_plain and is_of_matrices(operation)


def is_of_matrices(operation: Operation) -> TypeGuard[DotGeneral]:
    """Returns True if a contraction is a product of matrices, without batch axes."""
    return isinstance(operation, DotGeneral) and operation.dims[1] == ((), ())


class FloatKernel(SumOfProducts):
    """The sums of products of two operands of floats, of which rhs is quantized.

    Subclasses lower it to a kernel; the reference has no kernel, and sums are rounded
    otherwise there. The values of rhs may be `TransposedValues`.
    """

    @property
    def sums_floats(self):
        return True

    def reference(self, *leaves):
        operation, (lhs, _), (lhs_q, rhs_q) = self.operands(*leaves)
        rhs = rhs_q.unpacked()
        return block_products.sum_products(self.how, operation, lhs, rhs, lhs_q, rhs)

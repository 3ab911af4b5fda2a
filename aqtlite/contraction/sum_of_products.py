"""The sums of products of two operands, as a function that is lowered for a target."""

import dataclasses
from typing import Any

import jax

from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import Operation
from aqtlite.qtensor.qtensor import Operand, QTensor


@dataclasses.dataclass(frozen=True)
class SumOfProducts(TargetDependent):
    """The sums of products of two operands, of which one at least is quantized.

    Subclasses say in which forms. Their arguments are arrays, from which `operands`
    makes the operands that `of` was given.
    """

    is_composite = True

    how: ContractionExecution
    structure: Any
    """Pytree structure of the arguments: the values of lhs and rhs, which come first to
    be seen as its operands, the operation, and the rest of both."""

    @classmethod
    def of(
        cls,
        how: ContractionExecution,
        operation: Operation,
        lhs: Operand,
        rhs: Operand,
        lhs_q: QTensor | None,
        rhs_q: QTensor | None,
    ) -> jax.Array:
        """Contracts two operands, given as those of `accumulation.sum_products`."""
        pairs = (lhs, lhs_q), (rhs, rhs_q)
        values = [x if q is None else q.qvalue for x, q in pairs]
        others = [with_values(q, None) for _, q in pairs]
        leaves, structure = jax.tree.flatten((values, operation, others))
        return cls(how, structure)(*leaves)

    def operands(self, *leaves: Any) -> tuple[Any, Any, Any]:
        """Returns the operation, the values of both operands, and both quantized."""
        values, operation, others = jax.tree.unflatten(self.structure, leaves)
        return operation, values, list(map(with_values, others, values))


def with_values(q: QTensor | None, values: Any) -> QTensor | None:
    """Returns an operand with other values; None if it is not quantized."""
    return None if q is None else dataclasses.replace(q, qvalue=values, unrounded=None)

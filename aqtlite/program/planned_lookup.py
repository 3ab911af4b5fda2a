"""A planned lookup of rows in a table of parameters, and its evaluation.

A lookup freezes its table as a contraction freezes a weight. If a contraction of the
same table, such as that of the logits, quantizes it alike, both read one table: the
lookup quantizes it as that contraction sees it, and is found under its module.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, operations
from aqtlite.contraction import lookup
from aqtlite.jaxpr import registry
from aqtlite.jaxpr.origins import Origin
from aqtlite.jaxpr.recognition import lookups
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import OperandAxes, Operation, Side
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.program.planned_operation import NO_STATES, PlannedOperation
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.statistics import States


@dataclasses.dataclass(frozen=True)
class PlannedLookup(PlannedOperation):
    """A lookup of rows in a table of parameters, and the decision about it."""

    path: str
    """Path that rules match, with ``#`` and a number from the second lookup on."""

    module: str
    """As `PlannedContraction.module`."""

    kept_under: str
    """Name under which its table is kept: that of `contraction`, if there is one."""

    lhs: PlannedOperand
    """The table."""

    rhs: PlannedOperand
    """The indices; of a `dynamic_slice`, the first."""

    rule: int | None
    """Index of the first rule that matches it; None if none does."""

    cfg: config.DotGeneral
    """Config whose ``fwd.rhs`` quantizes the table; `config.unquantized()` if it stays
    in float."""

    why_float: str | None
    """Reason why it stays in float; None if it is quantized."""

    is_injected: bool
    """Whether the config comes from a quantized model inside of the program."""

    site: Site = dataclasses.field(repr=False, compare=False)

    contraction: PlannedContraction | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    """The contraction that reads the same quantized table, if there is one."""

    parameters: tuple[str, ...] = ()
    """Paths of the parameters that its table is made of."""

    op: str = registry.LOOKUP
    registered: str | None = None
    equation: str | None = None

    @property
    def description(self) -> str:
        """Its operation."""
        return self.op

    def left_float(self) -> "PlannedLookup":
        """Returns the lookup in float, named by no rule."""
        return dataclasses.replace(
            self,
            rule=None,
            cfg=config.unquantized(),
            why_float="no rule names it",
            contraction=None,
        )

    @property
    def is_quantized(self) -> bool:
        """Whether its table is quantized."""
        return self.why_float is None

    @property
    def reads_weight(self) -> bool:
        """Whether it reads a parameter, as all planned lookups do."""
        return True

    @property
    def adapter(self) -> None:
        """None: adapters are of contractions."""
        return None

    @property
    def collections(self) -> Mapping[str, list[str]]:
        """As `PlannedContraction.collections`: lookups use none."""
        return {}

    @property
    def size(self) -> float:
        """Number of elements of the table."""
        return float(np.prod(self.lhs.shape))

    @property
    def axis(self) -> int:
        """Axis of the rows of the table."""
        found = lookups.axis_of(self.site.eqn)
        assert isinstance(found, int), found  # Of a quantized lookup.
        return found

    @property
    def order(self) -> tuple[int, ...]:
        """Axes of the table in the order in which `contraction` sees them."""
        own = self.site.operands[0].untransposed(2)
        if self.contraction is None or own is None:
            return (0, 1)
        other = self.contraction.origins["rhs"].untransposed(2)
        assert other is not None, self.contraction.path
        return tuple(own.permutation.index(axis) for axis in other.permutation)

    @property
    def origins(self) -> dict[Side, Origin]:
        """Origin of the table, as `contraction` sees it."""
        if self.contraction is not None:
            return {"rhs": self.contraction.origins["rhs"]}
        return {"rhs": self.site.operands[0]}

    def index(self, side: Side) -> int:
        """Returns the index, among its equation's inputs, of a side of the config."""
        return int(side == "lhs")

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Returns its inputs in the order of the config: the table second."""
        table, first, *rest = values
        return [first, table, *rest]

    def seen(self, table: Any) -> Any:
        """Returns the table, or its type, as `contraction` sees it."""
        if self.order == (0, 1):
            return table
        if isinstance(table, jax.Array):
            return jnp.transpose(table, self.order)
        return jax.ShapeDtypeStruct(table.shape[::-1], table.dtype)

    def stand_in(self, table: Any) -> tuple[Operation, Any]:
        """Returns the contraction of each row with a vector of zeros, and these.

        A table is frozen as the weight of that contraction.

        Args:
            table: result of `seen`.
        """
        contracting = 1 - self.order.index(self.axis)
        lhs = jnp.zeros((1, table.shape[contracting]), table.dtype)
        dims = (((1,), (contracting,)), ((), ()))
        return operations.DotGeneral.of(dims, lhs.shape, tuple(table.shape)), lhs

    def for_freezing(self) -> config.DotGeneral:
        """Returns the config that its table is frozen with, that of `contraction`."""
        one = self if self.contraction is None else self.contraction
        return one.cfg.for_serving()

    def contract(
        self, cfg: config.DotGeneral, operands: Sequence[Any], states: States
    ) -> list[jax.Array]:
        """Evaluates it quantized.

        Args:
            cfg: the config of the table.
            operands: result of `in_order`; the table may be a `QTensor`, as
                `contraction` sees it.
            states: no states; a table's calibration has none.
        """
        del states
        first, table, *rest = operands
        if not isinstance(table, QTensor):
            seen = self.seen(table)
            axis = self.order.index(self.axis)
            axes = OperandAxes.of_contracting(2, (1 - axis,))
            table = lookup.quantized(seen, cfg.fwd.rhs, axes)
        if self.order != (0, 1):
            table = table.transpose(self.order)  # Of two axes, its own inverse.
        take = functools.partial(
            lookups.take, self.site.eqn, self.axis, indices=[first, *rest]
        )
        return [lookup.rows(table, self.axis, take)]

    def in_float(
        self, values: Sequence[Any], states: States = NO_STATES
    ) -> list[jax.Array]:
        """Evaluates it in float.

        Args:
            values: the inputs of its equation.
            states: not read; contractions have parameters of adapters there.
        """
        del states
        return self.bound(values)


Planned = PlannedContraction | PlannedLookup
"""What is quantized by one config, and may freeze a weight."""

"""A contraction of a program, and what rules make of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from aqtlite import config
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import Side

Kind = Literal["weight", "activation", "constant"]


@dataclasses.dataclass(frozen=True)
class PlannedOperand:
    """An operand of a contraction."""

    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    """"weight": its value depends on nothing but parameters. "constant": on nothing."""

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class PlannedContraction:
    """A contraction of a program, and what becomes of it."""

    path: str
    """The name scopes around it, and its number if there are several of the path."""

    module: str
    """The path without the number."""

    op: str
    """The function of `jax.lax` that contracts."""

    registered: str | None
    """The name of the kernel or function that it is a part of (`register_operation`),
    if so."""

    equation: str | None
    """Of a `dot_general`: its axes as an einsum's equation."""

    lhs: PlannedOperand
    rhs: PlannedOperand
    rule: int | None
    """The index of the rule that decides; None if there is none."""

    cfg: config.DotGeneral
    """The config by which it is quantized, `config.unquantized()` for none."""

    why_float: str | None
    """Why it stays in float, if so."""

    why_not_smoothed: str | None
    """Why it takes the config of the rule without its smoothing, if so."""

    is_injected: bool
    """The config was given where it is called, and goes before those of rules."""

    site: Site = dataclasses.field(repr=False, compare=False)

    @property
    def description(self) -> str:
        """What it computes: its axes, or operation, and the kernel that does."""
        what = self.equation or self.op
        return what if self.registered is None else f"{self.registered}: {what}"

    @property
    def is_quantized(self) -> bool:
        """True unless it stays in float."""
        return self.why_float is None

    @property
    def is_exchanged(self) -> bool:
        """True if its weight is its lhs, which takes the part of the config's rhs."""
        if self.is_injected:
            return False
        is_weight = self.lhs.kind == "weight" and self.rhs.kind != "weight"
        return self.op == "dot_general" and is_weight

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Returns its inputs with the weight, if it has one, as the second."""
        lhs, rhs, *rest = values
        return [rhs, lhs, *rest] if self.is_exchanged else [lhs, rhs, *rest]

    def index(self, side: Side) -> int:
        """Returns the index of an operand among the inputs of its equation."""
        return int((side == "rhs") != self.is_exchanged)

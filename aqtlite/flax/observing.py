"""Contractions as a conversion sees them while it traces a model."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flax.core import Scope

from aqtlite import config
from aqtlite import dimension_numbers as dn
from aqtlite.flax.site import Caller, Operand
from aqtlite.qtensor import QTensor


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A call of an `AqtDotGeneral` whose config quantizes."""

    caller: Caller | None
    cfg: config.DotGeneral
    frozen_operands: str
    name: str | None
    dims: dn.DimensionNumbers
    lhs: Any
    rhs: Any

    def operand(self, side: str) -> Operand:
        """What is static about an operand."""
        (lhs_ca, rhs_ca), _ = self.dims
        x, axes = (self.lhs, lhs_ca) if side == "lhs" else (self.rhs, rhs_ca)
        return Operand(side, tuple(x.shape), tuple(sorted(axes)), x.dtype)

    def batch_axes(self, side: str) -> tuple[int, ...]:
        """The batch axes of an operand."""
        _, (lhs_ba, rhs_ba) = self.dims
        return tuple(lhs_ba if side == "lhs" else rhs_ba)

    def quantized_sides(self) -> list[str]:
        """The operands that the config quantizes, and that are not yet quantized."""
        raw = self.cfg.fwd
        sides = (("lhs", raw.lhs, self.lhs), ("rhs", raw.rhs, self.rhs))
        return [
            side
            for side, tensor, x in sides
            if tensor.is_quantized and not isinstance(x, QTensor)
        ]


class Key(NamedTuple):
    """An operand of a contraction, the same in every trace of one call of a model."""

    path: tuple[str, ...]
    """Of the calling module."""

    position: int
    """Of the contraction among those of the module."""

    side: str


Observer = Callable[[Contraction, int], tuple[Any, Any]]
"""Takes a contraction and its position; returns the operands to go on with."""


class _Counted:
    """Counts the contractions of each scope.

    A scope is counted anew wherever Flax makes a new one: at every call of a lifted
    transformation, and every time it traces the body of one.
    """

    def __init__(self, observer: Observer):
        self._observer = observer
        self._scopes: dict[int, tuple[Scope | None, int]] = {}

    def observe(self, contraction: Contraction) -> tuple[Any, Any]:
        """Hands a contraction on, with its position."""
        scope = None if contraction.caller is None else contraction.caller.scope
        # The scope is kept, so that no other one gets its id.
        _, position = self._scopes.get(id(scope), (scope, 0))
        self._scopes[id(scope)] = scope, position + 1
        return self._observer(contraction, position)


_current: contextvars.ContextVar[_Counted | None] = contextvars.ContextVar(
    "aqtlite_observer", default=None
)


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """While it lasts, contractions are handed to an observer, and not served."""
    token = _current.set(_Counted(observer))
    try:
        yield
    finally:
        _current.reset(token)


def is_observed() -> bool:
    """Whether `observed_by` is in effect."""
    return _current.get() is not None


def observe(contraction: Contraction) -> tuple[Any, Any]:
    """Hands a contraction to the observer; returns the operands to go on with."""
    counted = _current.get()
    if counted is None:
        return contraction.lhs, contraction.rhs
    return counted.observe(contraction)

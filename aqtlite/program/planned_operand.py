"""An operand of a planned contraction."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from aqtlite.jaxpr.origins import Loop, Origin
from aqtlite.shapes.sharding import describe

Kind = Literal["weight", "activation", "constant", "gradient"]


@dataclasses.dataclass(frozen=True)
class PlannedOperand:
    """An operand of a contraction."""

    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    """"weight": depends only on parameters. "constant": depends on no input.
    "gradient": in a user's rule for a gradient, depends on that of a result.
    "activation": any other."""

    @classmethod
    def of(
        cls, aval: Any, origin: Origin, parameters: Collection[int]
    ) -> "PlannedOperand":
        """Returns an operand.

        Args:
            aval: its type.
            origin: its origin.
            parameters: indices of the program's inputs that are parameters.
        """
        return cls(aval.shape, aval.dtype.name, _kind(origin, parameters))

    def __str__(self) -> str:
        return f"{self.kind} {describe(self)}"


def _kind(origin: Origin, parameters: Collection[int]) -> Kind:
    needed = origin.needed
    if not needed:
        return "constant"
    is_steady = not any(isinstance(one, Loop) and one.is_carried for one in needed)
    inputs = {one for one in needed if not isinstance(one, Loop)}
    return (
        "weight" if inputs and is_steady and inputs <= set(parameters) else "activation"
    )

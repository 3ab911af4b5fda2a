"""An equation of a jaxpr that no pass has made another operator of."""

import dataclasses
from typing import Any

from aqtlite.edge.operators.base import Operator
from aqtlite.jaxpr import equations


@dataclasses.dataclass(frozen=True, eq=False)
class Equation(Operator):
    """An equation as JAX traced it."""

    eqn: Any
    jaxpr: Any
    """Any jaxpr, whose other fields the equation is evaluated with."""

    name = "equation"

    @property
    def name_in_rules(self) -> str:
        return self.primitive

    @property
    def primitive(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive."""
        return dict(self.eqn.params)

    def compute(self, *inputs: Any) -> Any:
        (result,) = self.compute_all(*inputs)
        return result

    def compute_all(self, *inputs: Any) -> list[Any]:
        """All outputs of an equation that may have several."""
        return equations.evaluate(self.jaxpr, self.eqn, inputs)

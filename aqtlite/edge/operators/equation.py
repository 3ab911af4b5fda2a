"""An equation of a jaxpr that no pass has made another operator of."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from jax.extend import core

from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators.base import Operator


@dataclasses.dataclass(frozen=True, eq=False)
class Equation(Operator):
    """An equation as JAX traced it."""

    eqn: Any
    jaxpr: Any
    """Any jaxpr, whose other fields the equation is evaluated with."""

    name = "equation"

    @property
    def primitive(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive."""
        return dict(self.eqn.params)

    def compute(self, *inputs: Any) -> Any:
        results = self.compute_all(*inputs)
        (result,) = results
        return result

    def compute_all(self, *inputs: Any) -> list[Any]:
        """All outputs of an equation that may have several."""
        eqn = self.eqn
        given: dict[Any, Any] = {}
        for atom, value in zip(eqn.invars, inputs, strict=True):
            if not isinstance(atom, core.Literal):
                given[atom] = value
        single = self.jaxpr.replace(
            constvars=[],
            invars=list(given),
            outvars=list(eqn.outvars),
            eqns=[eqn],
            effects=eqn.effects,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        run = core.jaxpr_as_fun(core.ClosedJaxpr(single, ()))
        return run(*given.values())

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> NoReturn:
        raise NotImplementedError(f"{self.primitive} has no integers")

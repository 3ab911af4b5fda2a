"""What planned contractions and lookups share: their equation, and its replacements."""

import abc
from collections.abc import Sequence
from typing import Any

import jax

from aqtlite.config import DotGeneral
from aqtlite.contraction import tapped
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.jaxpr.sites import Site
from aqtlite.program import injected
from aqtlite.quantization.states.statistics import States

NO_STATES = States()


class PlannedOperation(abc.ABC):
    """An equation of a program, and the config that quantizes it."""

    path: str
    cfg: DotGeneral
    site: Site

    @property
    def is_of_activations(self) -> bool:
        """Whether it contracts two activations, both quantized as the config's lhs."""
        return False

    @abc.abstractmethod
    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Returns the inputs of its equation in the order of `contract`."""

    @abc.abstractmethod
    def contract(
        self, cfg: DotGeneral, operands: Sequence[Any], states: States
    ) -> list[jax.Array]:
        """Evaluates it quantized, given the result of `in_order`."""

    @abc.abstractmethod
    def in_float(
        self, values: Sequence[Any], states: States = NO_STATES
    ) -> list[jax.Array]:
        """Evaluates it in float, given the inputs of its equation."""

    def replacement(self, states: States) -> Replacement:
        """Returns the replacement of its equation that is quantized."""

        def function(values: Sequence[Any], states: States) -> tuple[Any, None]:
            known = tapped.Planned(self.path, self.is_of_activations)
            with tapped.planned_as(known):
                return self.contract(self.cfg, self.in_order(values), states), None

        return Replacement(function, states, per_step=self.site.per_step)

    def marked(self, states: States) -> Replacement:
        """Returns the replacement that is left in float, marked with the config."""

        def function(values: Sequence[Any], states: States) -> tuple[Any, None]:
            del states
            mark = injected.Injected(injected.Equation.of(self.site.eqn), self.cfg)
            return [mark(*values)], None

        return Replacement(function, states)

    def bound(self, values: Sequence[Any]) -> list[jax.Array]:
        """Evaluates its equation as it stands."""
        return [injected.Equation.of(self.site.eqn)(*values)]

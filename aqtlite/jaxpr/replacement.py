"""Replacements of equations of a jaxpr, at any depth of its bodies."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax.extend import core

Step = tuple[int, int]
"""The index of an equation, and of the body in it that the next step leads into."""

Location = tuple[Step, ...]
"""The place of an equation: the steps to it from the outermost jaxpr."""


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A function evaluated in place of an equation, with further arrays.

    Arrays may be given to it (weights that are served), and it may return auxiliary
    ones (weights that are recorded), through all loops around the equation.
    """

    function: Callable[[Sequence[Any], Any], tuple[Sequence[Any], Any]]
    """Takes the inputs of the equation and `given`; returns the outputs of the equation
    and a pytree of auxiliary arrays."""

    given: Any = None
    """Pytree of arrays for the function; None for none."""

    has_aux: bool = False
    """Whether the auxiliary arrays are kept; they have the structure of `given` if that
    is not None."""

    per_step: tuple[bool, ...] = ()
    """For each scan around the equation, the outermost first: whether every step has
    other arrays. If not, all steps are given equal arrays, or each step is given the
    auxiliary arrays of the step before, and those of the last step are the result."""


Replacements = Mapping[Location, Replacement]

Aux = dict[Location, Any]
"""Auxiliary arrays of replacements, by location."""


class Evaluate(Protocol):
    """Evaluates a jaxpr with some of its equations replaced."""

    def __call__(
        self,
        closed: core.ClosedJaxpr,
        inputs: Sequence[Any],
        replacements: Replacements,
    ) -> tuple[list[Any], Aux]: ...


@dataclasses.dataclass(frozen=True)
class Inside:
    """Replacements in the bodies of one equation."""

    replacements: Replacements
    evaluate: Evaluate

    def given(self) -> Aux:
        """Arrays given to the replacements, by location."""
        return {location: one.given for location, one in self.replacements.items()}

    def giving(self, given: Mapping[Location, Any]) -> "Inside":
        """These replacements with other arrays given to them."""
        replacements = {
            location: dataclasses.replace(one, given=given[location])
            for location, one in self.replacements.items()
        }
        return dataclasses.replace(self, replacements=replacements)

    def unchanged_aux(self) -> Aux:
        """Auxiliary arrays where no body is evaluated: those given."""
        return {
            location: one.given
            for location, one in self.replacements.items()
            if one.has_aux
        }

    def body(
        self, closed: core.ClosedJaxpr, index: int, values: Sequence[Any]
    ) -> tuple[list[Any], Aux]:
        """Evaluates a body of the equation, with what is replaced there.

        Args:
            closed: body of the equation.
            index: index of the body among those of the equation.
            values: inputs of the body.
        """
        steps = {place[0] for place in self.replacements if place[0][1] == index}
        if not steps:
            return core.jaxpr_as_fun(closed)(*values), {}
        (step,) = steps
        there = {
            place[1:]: one
            for place, one in self.replacements.items()
            if place[0] == step
        }
        outputs, aux = self.evaluate(closed, values, there)
        return outputs, {(step, *place): one for place, one in aux.items()}

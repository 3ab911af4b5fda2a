"""Replacements of equations of a jaxpr, at any depth of nested bodies."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax.extend import core

Step = tuple[int, int]
"""Index of an equation, and of the body in it where the next step is."""

Location = tuple[Step, ...]
"""Location of an equation: the steps to it from the outermost jaxpr."""


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A function evaluated in place of an equation, with further arrays.

    Through all loops around the equation, arrays may be given to it (frozen weights),
    and it may return auxiliary arrays (recorded weights).
    """

    function: Callable[[Sequence[Any], Any], tuple[Sequence[Any], Any]]
    """Function from the inputs of the equation and `given` to the outputs of the
    equation and a pytree of auxiliary arrays."""

    given: Any = None
    """Pytree of arrays for the function; None for none."""

    has_aux: bool = False
    """Whether the auxiliary arrays are kept. They have the structure of `given`, unless
    that is None."""

    per_step: tuple[bool, ...] = ()
    """For each scan around the equation, outermost first, whether every step has its
    own arrays. If not, all steps are given the same arrays; with `has_aux`, each step
    is given the auxiliary arrays of the previous step, and those of the last are kept.
    """

    beside: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Transformation of what is computed beside it from the original program: the
    residuals of the rules of `jax.custom_jvp` and `jax.custom_vjp`; None for none."""


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

    def beside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Transforms what is computed beside the replacements."""
        found = (one.beside for one in self.replacements.values())
        made = next(filter(None, found), None)
        return function if made is None else made(function)

    def giving(self, given: Mapping[Location, Any]) -> "Inside":
        """Returns these replacements with other given arrays."""
        replacements = {
            location: dataclasses.replace(one, given=given[location])
            for location, one in self.replacements.items()
        }
        return dataclasses.replace(self, replacements=replacements)

    def unchanged_aux(self) -> Aux:
        """Returns the auxiliary arrays if no body is evaluated: the given arrays."""
        return {
            location: one.given
            for location, one in self.replacements.items()
            if one.has_aux
        }

    def body(
        self, closed: core.ClosedJaxpr, index: int, values: Sequence[Any]
    ) -> tuple[list[Any], Aux]:
        """Evaluates a body of the equation with the replacements in it.

        Args:
            closed: body of the equation.
            index: index of the body among the bodies of the equation.
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

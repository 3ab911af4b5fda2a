"""What takes the place of equations of a jaxpr, wherever in it they are."""

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
    """What takes the place of an equation."""

    function: Callable[[Sequence[Any], Any], tuple[Sequence[Any], Any]]
    """Takes the inputs of the equation and what is given; returns its outputs and a
    pytree of arrays to leave."""

    given: Any = None
    """A pytree of arrays."""

    leaves: bool = False
    """It leaves arrays; of the structure of those that it is given, if there are any.
    Otherwise what it returns in their place is dropped."""

    per_step: tuple[bool, ...] = ()
    """For each scan around it, the outermost first, whether each step has arrays of its
    own. Otherwise all steps are given the same; or what one leaves is given to the
    next, and the last one leaves it."""


Replacements = Mapping[Location, Replacement]

Left = dict[Location, Any]
"""What replacements left."""


class Evaluate(Protocol):
    """Evaluates a jaxpr with some of its equations replaced."""

    def __call__(
        self,
        closed: core.ClosedJaxpr,
        inputs: Sequence[Any],
        replacements: Replacements,
    ) -> tuple[list[Any], Left]: ...


@dataclasses.dataclass(frozen=True)
class Inside:
    """What is replaced in the bodies of an equation."""

    replacements: Replacements
    evaluate: Evaluate

    def given(self) -> Left:
        """What the replacements are given, by location."""
        return {location: one.given for location, one in self.replacements.items()}

    def giving(self, given: Mapping[Location, Any]) -> "Inside":
        """The same replacements, given something else."""
        replacements = {
            location: dataclasses.replace(one, given=given[location])
            for location, one in self.replacements.items()
        }
        return dataclasses.replace(self, replacements=replacements)

    def left_unchanged(self) -> Left:
        """What is left where nothing is evaluated: what was given."""
        return {
            location: one.given
            for location, one in self.replacements.items()
            if one.leaves
        }

    def body(
        self, closed: core.ClosedJaxpr, index: int, values: Sequence[Any]
    ) -> tuple[list[Any], Left]:
        """Evaluates a body of the equation, with what is replaced there.

        Args:
            closed: the body.
            index: which one it is.
            values: its inputs.
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
        outputs, left = self.evaluate(closed, values, there)
        return outputs, {(step, *place): one for place, one in left.items()}

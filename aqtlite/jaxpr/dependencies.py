"""Dependency analysis: the inputs of a jaxpr that a value depends on.

An output of `while` or `cond` counts as depending on all inputs of the equation, which
is conservative.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import analysis, equations, registry
from aqtlite.jaxpr.replacement import Location

Dependencies = frozenset[int]
"""Indices of inputs."""

_NOTHING: Dependencies = frozenset()


def output_dependencies(closed: core.ClosedJaxpr) -> list[Dependencies]:
    """Returns, for each output of a jaxpr, the inputs that its value depends on."""
    inputs = [frozenset({i}) for i in range(len(closed.in_avals))]
    return analysis.analyze(closed.jaxpr, inputs, _Dependencies())


def read_inputs(
    closed: core.ClosedJaxpr,
    inputs: Collection[int],
    unread: Mapping[Location, Collection[int]],
) -> Dependencies:
    """Returns which of some inputs the outputs depend on.

    Args:
        closed: the jaxpr.
        inputs: indices of the inputs in question.
        unread: indices of operands to ignore, by location of the equation.
    """
    places = {((0, 0), *location): operands for location, operands in unread.items()}
    facts = [
        frozenset({i}) if i in inputs else _NOTHING for i in range(len(closed.in_avals))
    ]
    return _NOTHING.union(*analysis.analyze(closed.jaxpr, facts, _WithUnread(places)))


def equation_dependencies(eqn: Any) -> list[Dependencies]:
    """Returns, for each output of an equation, the inputs that it depends on."""
    inputs = [frozenset({i}) for i in range(len(eqn.invars))]
    return analysis.analyze_equation(eqn, inputs, _Dependencies())


class _Dependencies(analysis.Analysis[Dependencies]):
    def constant(self, aval: Any) -> Dependencies:
        del aval
        return _NOTHING

    def join(self, first: Dependencies, second: Dependencies) -> Dependencies:
        return first | second

    def equation(self, eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
        return [_NOTHING.union(*inputs)] * len(eqn.outvars)


class _WithUnread(_Dependencies):
    """Ignores some operands of equations, also inside branches and loops."""

    def __init__(self, unread: Mapping[Location, Collection[int]]):
        self._unread = unread
        """The first step of each place is the equation that is analyzed."""
        below: dict[int, dict[Location, Collection[int]]] = {}
        for place, operands in unread.items():
            if len(place) > 1:
                below.setdefault(place[1][0], {})[place[1:]] = operands
        self._below = {index: _WithUnread(places) for index, places in below.items()}

    def inside(self, index: int) -> "_WithUnread":
        return self._below.get(index, _EVERYTHING_READ)

    def body(self, eqn: Any) -> core.ClosedJaxpr | None:
        """Follows a registered operation into its reference if that replaces it."""
        is_run = any(len(place) > 1 for place in self._unread)
        name = registry.name_of(eqn) if is_run else None
        return super().body(eqn) if name is None else registry.body_of(eqn, name)

    def equation(self, eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
        if eqn.primitive is primitives.cond_p:
            of_branches = [
                analysis.analyze(branch.jaxpr, inputs[1:], self._of_body(number))
                for number, branch in enumerate(equations.Cond.of(eqn).branches)
            ]
            return [inputs[0].union(*x) for x in zip(*of_branches, strict=True)]
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, inputs)
        if eqn.primitive.name == "shard_map":
            (body,) = equations.bodies(eqn)
            return analysis.analyze(body.jaxpr, inputs, self)
        unread = next((x for place, x in self._unread.items() if len(place) == 1), ())
        read = [one for i, one in enumerate(inputs) if i not in unread]
        return super().equation(eqn, read)

    def _of_body(self, number: int) -> "_WithUnread":
        """Returns the analysis for one body of the equation."""
        return _WithUnread(
            {
                place: operands
                for place, operands in self._unread.items()
                if place[0][1] == number
            }
        )

    def _while(self, eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
        """Joins the carry of a loop with the body's outputs until nothing changes."""
        loop = equations.While.of(eqn)
        of_condition, of_body, after = loop.of_inputs(inputs)
        carry: list[Dependencies] = []
        while carry != after:
            carry = after
            made = analysis.analyze(
                loop.body.jaxpr, [*of_body, *carry], self._of_body(1)
            )
            after = list(map(self.join, carry, made))
        (decided,) = analysis.analyze(
            loop.condition.jaxpr, [*of_condition, *carry], self._of_body(0)
        )
        return [one | decided for one in carry]


_EVERYTHING_READ = _WithUnread({})

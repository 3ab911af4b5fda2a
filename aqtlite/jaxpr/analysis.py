"""Forward analysis of a jaxpr: from facts about its inputs to facts about its outputs.

The walk follows calls and scans into their bodies; the analysis handles all other
equations. Two analyses follow it here: the inputs that a value depends on, and the
inputs that the outputs forward unchanged.
"""

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import equations, marks, registry
from aqtlite.jaxpr.replacement import Location

Fact = TypeVar("Fact")


class Analysis(abc.ABC, Generic[Fact]):
    """The rules that derive facts about values from one another."""

    @abc.abstractmethod
    def constant(self, atom: Any) -> Fact:
        """Returns the fact about a literal, or about a variable that is a constant."""

    @abc.abstractmethod
    def equation(self, eqn: Any, inputs: list[Fact]) -> list[Fact]:
        """Returns the facts about the outputs of an equation that is not followed.

        Scans, mapped calls, and equations with a `body`, are followed.
        """

    @abc.abstractmethod
    def join(self, first: Fact, second: Fact) -> Fact:
        """Returns the facts true of both values, such as of two steps of a carry."""

    def inside(self, index: int) -> "Analysis[Fact]":
        """Returns the rules for an equation, and for those in its body.

        Args:
            index: index of the equation.
        """
        del index
        return self

    def body(self, eqn: Any) -> core.ClosedJaxpr | None:
        """Returns the body of an equation that is followed as a call; None for none."""
        return equations.called_body(eqn)

    def unstack(self, fact: Fact) -> Fact:
        """Returns the fact about a slice of an array along its leading axis.

        Each step of a scan has one, and each call that `jax.vmap` maps.
        """
        return fact

    def stack(self, fact: Fact, scanned: Sequence[Fact]) -> Fact:
        """Returns the fact about an array of slices that are stacked again.

        Args:
            fact: fact about one slice.
            scanned: facts about the arrays that are sliced.
        """
        del scanned
        return fact


def analyze(jaxpr: Any, inputs: Sequence[Fact], analysis: Analysis[Fact]) -> list[Fact]:
    """Returns the facts about the outputs of a jaxpr.

    Args:
        jaxpr: an open `Jaxpr`.
        inputs: the facts about its inputs.
        analysis: the rules.
    """
    known = {var: analysis.constant(var) for var in jaxpr.constvars}
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Fact:
        if isinstance(atom, core.Literal):
            return analysis.constant(atom)
        return known[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        inner = analysis.inside(index)
        outputs = analyze_equation(eqn, [read(a) for a in eqn.invars], inner)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def analyze_equation(
    eqn: Any, inputs: list[Fact], analysis: Analysis[Fact]
) -> list[Fact]:
    """Returns the facts about the outputs of one equation."""
    if eqn.primitive is primitives.scan_p:
        return _scan(eqn, inputs, analysis)
    mapped = marks.mapped_call(eqn)
    if mapped is not None:
        return _mapped(mapped, inputs, analysis)
    body = analysis.body(eqn)
    if body is not None:
        return analyze(body.jaxpr, inputs, analysis)
    return analysis.equation(eqn, inputs)


def _mapped(
    call: marks.MappedCall, inputs: list[Fact], analysis: Analysis[Fact]
) -> list[Fact]:
    pairs = list(zip(inputs, call.is_mapped, strict=True))
    of_call = [analysis.unstack(fact) if one else fact for fact, one in pairs]
    outputs = analyze(call.body.jaxpr, of_call, analysis)
    scanned = [fact for fact, one in pairs if one]
    return [analysis.stack(fact, scanned) for fact in outputs]


def _scan(eqn: Any, inputs: list[Fact], analysis: Analysis[Fact]) -> list[Fact]:
    """Joins the facts about the carry before and after a step until nothing changes."""
    scan = equations.Scan.of(eqn)
    consts, start, scanned = scan.of_inputs(inputs)
    slices = [analysis.unstack(fact) for fact in scanned]
    carry = start
    while True:
        outputs = analyze(scan.body.jaxpr, [*consts, *carry, *slices], analysis)
        final, stacks = scan.of_outputs(outputs)
        joined = list(map(analysis.join, carry, final))
        if joined == carry:
            if scan.length == 0:
                final = start
            return [*final, *(analysis.stack(fact, scanned) for fact in stacks)]
        carry = joined


Dependencies = frozenset[int]
"""Indices of inputs."""

_NOTHING: Dependencies = frozenset()


def output_dependencies(closed: core.ClosedJaxpr) -> list[Dependencies]:
    """Returns, for each output of a jaxpr, the inputs that its value depends on.

    An output of `while` or `cond` counts as depending on all inputs of the equation,
    which is conservative.
    """
    inputs = [frozenset({i}) for i in range(len(closed.in_avals))]
    return analyze(closed.jaxpr, inputs, _Dependencies())


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
    facts = [
        frozenset({i}) if i in inputs else _NOTHING for i in range(len(closed.in_avals))
    ]
    return _NOTHING.union(*analyze(closed.jaxpr, facts, reading_all_but(unread)))


def reading_all_but(
    unread: Mapping[Location, Collection[int]],
) -> Analysis[Dependencies]:
    """Returns the analysis of dependencies that ignores some operands of equations."""
    places = {((0, 0), *location): operands for location, operands in unread.items()}
    return _WithUnread(places)


def equation_dependencies(eqn: Any) -> list[Dependencies]:
    """Returns, for each output of an equation, the inputs that it depends on."""
    inputs = [frozenset({i}) for i in range(len(eqn.invars))]
    return analyze_equation(eqn, inputs, _Dependencies())


class _Dependencies(Analysis[Dependencies]):
    def constant(self, atom: Any) -> Dependencies:
        del atom
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
                analyze(branch.jaxpr, inputs[1:], self._of_body(number))
                for number, branch in enumerate(equations.Cond.of(eqn).branches)
            ]
            return [inputs[0].union(*x) for x in zip(*of_branches, strict=True)]
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, inputs)
        if eqn.primitive.name == "shard_map":
            (body,) = equations.bodies(eqn)
            return analyze(body.jaxpr, inputs, self)
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
            made = analyze(loop.body.jaxpr, [*of_body, *carry], self._of_body(1))
            after = list(map(self.join, carry, made))
        (decided,) = analyze(
            loop.condition.jaxpr, [*of_condition, *carry], self._of_body(0)
        )
        return [one | decided for one in carry]


_EVERYTHING_READ = _WithUnread({})

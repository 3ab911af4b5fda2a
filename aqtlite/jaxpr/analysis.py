"""Forward analysis of a jaxpr: from facts about its inputs to facts about its outputs.

The walk follows calls and scans into their bodies. The analysis handles all other
equations.
"""

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import equations

Fact = TypeVar("Fact")


class Analysis(abc.ABC, Generic[Fact]):
    """The rules that derive facts about values from one another."""

    @abc.abstractmethod
    def constant(self, aval: Any) -> Fact:
        """Returns the fact about a literal or a constant."""

    @abc.abstractmethod
    def equation(self, eqn: Any, inputs: list[Fact]) -> list[Fact]:
        """Returns the facts about the outputs of an equation that is not followed.

        Scans, and equations with a `body`, are followed.
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
        """Returns the fact about a scan's slice of an array along the leading axis."""
        return fact

    def stack(self, fact: Fact, scanned: Sequence[Fact]) -> Fact:
        """Returns the fact about an array of slices that a scan stacks.

        Args:
            fact: fact about one slice.
            scanned: facts about the arrays that the scan slices.
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
    known = {var: analysis.constant(var.aval) for var in jaxpr.constvars}
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Fact:
        if isinstance(atom, core.Literal):
            return analysis.constant(atom.aval)
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
    body = analysis.body(eqn)
    if body is not None:
        return analyze(body.jaxpr, inputs, analysis)
    return analysis.equation(eqn, inputs)


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

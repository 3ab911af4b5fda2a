"""Which changes of the inputs of a jaxpr its outputs see."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import analysis, equations
from aqtlite.jaxpr.analysis import Dependencies
from aqtlite.jaxpr.replacement import Location


def seen(
    closed: core.ClosedJaxpr,
    changed: Mapping[int, tuple[Any, Any]],
    unread: Mapping[Location, Collection[int]],
) -> Dependencies:
    """Returns which of some changed inputs the outputs see.

    What is computed from these inputs alone is compared, so that a part that did not
    change, such as another layer of a stack, is not seen. Inside of scans and other
    loops, all of an input that changed counts as changed.

    Args:
        closed: the jaxpr.
        changed: values before and after, by index of the input.
        unread: indices of operands to ignore, by location of the equation.
    """
    read = analysis.read_inputs(closed, changed.keys(), unread)
    if not read:
        return read
    facts = [
        _Fact(frozenset({i}), functools.partial(changed.__getitem__, i))
        if i in read
        else _UNKNOWN
        for i in range(len(closed.in_avals))
    ]
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    rules = _Changes(jaxpr, constants, analysis.reading_all_but(unread))
    outputs = analysis.analyze(jaxpr, facts, rules)
    return frozenset[int]().union(*(one.changes for one in outputs))


Pair = tuple[Any, Any]
"""A value before and after the change."""


@dataclasses.dataclass(frozen=True)
class _Fact:
    """What is known of a value."""

    inputs: Dependencies
    """Changed inputs that it depends on."""

    pair: Callable[[], Pair] | None = None
    """Computes it; None if it depends on other inputs, too."""

    @functools.cached_property
    def changes(self) -> Dependencies:
        """Changed inputs that change it, as far as is known."""
        if self.pair is None or not self.inputs:
            return self.inputs
        return self.inputs if _differ(*self.pair()) else frozenset()


@jax.jit  # Processes that an array spans can read no more than what comes of it.
def _differ(before: Any, after: Any) -> jax.Array:
    are_nan = (before != before) & (after != after)
    return ((before != after) & ~are_nan).any()


_UNKNOWN = _Fact(frozenset())


@dataclasses.dataclass(frozen=True)
class _Changes(analysis.Analysis[_Fact]):
    """Evaluates what depends on changed inputs alone."""

    jaxpr: Any
    constants: Mapping[Any, Any]
    reads: analysis.Analysis[Dependencies]

    def constant(self, atom: Any) -> _Fact:
        if isinstance(atom, core.Literal):
            value = equations.literal_value(atom)
        elif atom in self.constants:
            value = self.constants[atom]
        else:
            return _UNKNOWN
        return _Fact(frozenset(), lambda: (value, value))

    def join(self, first: _Fact, second: _Fact) -> _Fact:
        return _Fact(first.changes | second.changes)

    def unstack(self, fact: _Fact) -> _Fact:
        return _Fact(fact.changes)

    def inside(self, index: int) -> "_Changes":
        return dataclasses.replace(self, reads=self.reads.inside(index))

    def body(self, eqn: Any) -> core.ClosedJaxpr | None:
        return self.reads.body(eqn)

    def equation(self, eqn: Any, inputs: list[_Fact]) -> list[_Fact]:
        pairs = [one.pair for one in inputs if one.pair is not None]
        needed = frozenset[int]().union(*(one.inputs for one in inputs))
        if len(pairs) == len(inputs) and self._reads_all(eqn, inputs, needed):
            return self._evaluated(eqn, pairs, needed)
        found = self.reads.equation(eqn, [one.changes for one in inputs])
        return [_Fact(one) for one in found]

    def _reads_all(self, eqn: Any, inputs: list[_Fact], needed: Dependencies) -> bool:
        """Whether no operand is to be ignored that depends on changed inputs."""
        read = self.reads.equation(eqn, [one.inputs for one in inputs])
        return not needed.difference(*read)

    def _evaluated(
        self, eqn: Any, pairs: Sequence[Callable[[], Pair]], needed: Dependencies
    ) -> list[_Fact]:
        """The facts about the outputs of an equation, which are computed if asked."""

        @functools.cache
        def outputs(after: int) -> list[Any]:
            values = [pair()[after] for pair in pairs]
            return equations.evaluate(self.jaxpr, eqn, values)

        def of(index: int) -> Callable[[], Pair]:
            return functools.cache(lambda: (outputs(0)[index], outputs(1)[index]))

        return [_Fact(needed, of(index)) for index in range(len(eqn.outvars))]

"""Evaluates a jaxpr on two inputs, equation by equation, and compares all values."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import equations, scopes
from aqtlite.jaxpr.replacement import Location
from aqtlite.testing import differences
from aqtlite.testing.places import Places


class Pair(NamedTuple):
    """A value in both runs."""

    first: Any
    second: Any
    number: int | None
    """Number of the value; None if it is equal in both runs."""


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation that was evaluated, with numbers of the values that differ."""

    eqn: Any
    location: Location
    path: str
    """Its name scopes."""

    loops: tuple[int, ...]
    """Number of the step of each loop around it."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    is_moving: bool = False
    """Whether it is the part of a loop that slices an array, or stacks slices."""


@dataclasses.dataclass
class Runs:
    """What two runs of a program have evaluated so far."""

    steps: list[Step]
    """The equations, in the order in which they ran."""

    confined: list[bool]
    """For each value that differs, whether it does at changed places only."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an equation is."""

    places: Places
    location: Location = ()
    scope: str = ""
    loops: tuple[int, ...] = ()


def evaluate(
    closed: core.ClosedJaxpr,
    first: Sequence[Any],
    second: Sequence[Any],
    places: Places,
) -> tuple[Runs, list[int | None]]:
    """Evaluates a jaxpr on two inputs.

    Calls are entered, and so are loops and branches whose results differ elsewhere than
    at the changed places.

    Args:
        closed: the jaxpr.
        first: inputs of the first run.
        second: inputs of the second run.
        places: the places where inputs differ.

    Returns:
        The equations, and for each output the number of the value.
    """
    walk = _Walk(Runs([], []))
    pairs = [
        walk.pair(one, other, places) for one, other in zip(first, second, strict=True)
    ]
    outputs = walk.body(closed, pairs, _Place(places))
    return walk.runs, [one.number for one in outputs]


@dataclasses.dataclass(frozen=True)
class _Walk:
    runs: Runs

    def pair(self, first: Any, second: Any, places: Places) -> Pair:
        """Returns a new value."""
        differs = _differing(first, second)
        if not differs.any():
            return Pair(first, second, None)
        self.runs.confined.append(places.confine(differs))
        return Pair(first, second, len(self.runs.confined) - 1)

    def body(
        self, closed: core.ClosedJaxpr, inputs: Sequence[Pair], place: _Place
    ) -> list[Pair]:
        """Evaluates a jaxpr; returns its outputs."""
        jaxpr = closed.jaxpr
        known = {
            var: Pair(value, value, None)
            for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
        }
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Pair:
            if isinstance(atom, core.Literal):
                value = equations.literal_value(atom)
                return Pair(value, value, None)
            return known[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            values = [read(atom) for atom in eqn.invars]
            there = dataclasses.replace(
                place,
                location=(*place.location, (index, 0)),
                scope=scopes.join(place.scope, scopes.text_of(eqn)),
            )
            outputs = self._equation(jaxpr, eqn, values, there)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, jaxpr: Any, eqn: Any, values: list[Pair], there: _Place
    ) -> list[Pair]:
        body = equations.called_body(eqn)
        if body is not None:
            return self.body(body, values, there)
        is_same = all(one.number is None for one in values)
        firsts = equations.evaluate(jaxpr, eqn, [one.first for one in values])
        seconds = firsts
        if not is_same:
            seconds = equations.evaluate(jaxpr, eqn, [one.second for one in values])
        count = len(self.runs.confined)
        outputs = [
            self.pair(one, other, there.places)
            for one, other in zip(firsts, seconds, strict=True)
        ]
        if not all(self.runs.confined[count:]):
            entered = self._inside(eqn, values, there)
            if entered is not None:
                return entered
        self._note(eqn, values, outputs, there)
        return outputs

    def _note(
        self,
        eqn: Any,
        inputs: Sequence[Pair],
        outputs: Sequence[Pair],
        there: _Place,
        *,
        is_moving: bool = False,
    ) -> None:
        self.runs.steps.append(
            Step(
                eqn,
                there.location,
                scopes.parse(there.scope).path,
                there.loops,
                tuple(one.number for one in inputs),
                tuple(one.number for one in outputs),
                is_moving,
            )
        )

    def _inside(self, eqn: Any, values: list[Pair], there: _Place) -> list[Pair] | None:
        """Evaluates a loop or branch step by step; None for any other equation."""
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, values, there)
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, values, there)
        if eqn.primitive is primitives.cond_p:
            return self._branch(eqn, values, there)
        return None

    def _scan(self, eqn: Any, values: list[Pair], there: _Place) -> list[Pair]:
        scan = equations.Scan.of(eqn)
        consts, carry, scanned = scan.of_inputs(values)
        is_along = any(
            there.places.lead(_differing(one.first, one.second))
            for one in scanned
            if one.number is not None
        )
        numbers = range(scan.length)
        stacks: list[list[Pair]] = []
        for number in reversed(numbers) if scan.reverse else numbers:
            places = there.places
            if is_along:
                places = places.in_step(number, scan.length)
            inner = dataclasses.replace(
                there, places=places, loops=(*there.loops, number)
            )
            slices = [
                self.pair(one.first[number], one.second[number], places)
                for one in scanned
            ]
            for whole, one in zip(scanned, slices, strict=True):
                self._note(eqn, [whole], [one], inner, is_moving=True)
            outputs = self.body(scan.body, [*consts, *carry, *slices], inner)
            carry, stacked = scan.of_outputs(outputs)
            stacks.append(stacked)
        if scan.reverse:
            stacks.reverse()
        made = []
        for each in zip(*stacks, strict=True):
            first, second = (jnp.stack([one[run] for one in each]) for run in (0, 1))
            made.append(self.pair(first, second, there.places))
            self._note(eqn, each, made[-1:], there, is_moving=True)
        return [*carry, *made]

    def _while(self, eqn: Any, values: list[Pair], there: _Place) -> list[Pair] | None:
        loop = equations.While.of(eqn)
        of_condition, of_body, carry = loop.of_inputs(values)
        if loop.condition.out_avals[0].shape:
            return None  # Under `jax.vmap`, rows stop one by one.
        number = 0
        while True:
            goes_on = [
                bool(
                    _result(
                        loop.condition, [one[run] for one in (*of_condition, *carry)]
                    )
                )
                for run in (0, 1)
            ]
            if goes_on[0] != goes_on[1]:
                return None
            if not goes_on[0]:
                return carry
            inner = dataclasses.replace(there, loops=(*there.loops, number))
            carry = self.body(loop.body, [*of_body, *carry], inner)
            number += 1

    def _branch(self, eqn: Any, values: list[Pair], there: _Place) -> list[Pair] | None:
        index, *operands = values
        if index.number is not None:
            return None
        branches = equations.Cond.of(eqn).branches
        taken = int(np.clip(int(index.first), 0, len(branches) - 1))
        return self.body(branches[taken], operands, there)


def _result(closed: core.ClosedJaxpr, values: Sequence[Any]) -> Any:
    (result,) = core.jaxpr_as_fun(closed)(*values)
    return result


def _differing(first: Any, second: Any) -> np.ndarray:
    return differences.differing(differences.data(first), differences.data(second))

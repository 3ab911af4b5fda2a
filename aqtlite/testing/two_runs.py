"""Runs a jaxpr on two inputs, and finds which of all its values differ, and where."""

import dataclasses
import itertools
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
from aqtlite.testing.traced_values import QUICK, Constant, Read, TracedValues


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


@dataclasses.dataclass(frozen=True)
class Runs:
    """What two runs of a program have evaluated so far."""

    steps: list[Step]
    """The equations, in program order."""

    confined: list[bool]
    """For each value that differs, whether it does at changed places only."""


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
    runs = Runs([], [])
    pairs = [
        _pair(one, other, places, runs)
        for one, other in zip(first, second, strict=True)
    ]
    outputs = _body(TracedValues.of(closed, QUICK), pairs, _Place(places), runs)
    return runs, [one.number for one in outputs]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a body is."""

    places: Places
    location: Location = ()
    scope: str = ""
    loops: tuple[int, ...] = ()

    def in_step(self, number: int, places: Places | None = None) -> "_Place":
        """Returns the place in a step of a loop."""
        return dataclasses.replace(
            self, places=places or self.places, loops=(*self.loops, number)
        )


def _pair(first: Any, second: Any, places: Places, runs: Runs) -> Pair:
    """Returns a new value."""
    differs = _differing(first, second)
    if not differs.any():
        return Pair(first, second, None)
    runs.confined.append(places.confine(differs))
    return Pair(first, second, len(runs.confined) - 1)


def _body(
    traced: TracedValues, inputs: Sequence[Pair], place: _Place, runs: Runs
) -> list[Pair]:
    """Evaluates a jaxpr; returns its outputs."""
    firsts, seconds = (traced.run(*[one[run] for one in inputs]) for run in (0, 1))
    pairs = list(inputs)

    def read(one: Read) -> Pair:
        if isinstance(one, Constant):
            return Pair(one.value, one.value, None)
        return pairs[one]

    for equation in traced.equations:
        there = dataclasses.replace(
            place,
            location=(*place.location, *equation.location),
            scope=scopes.join(place.scope, equation.scope),
        )
        values = [read(one) for one in equation.inputs]
        count = len(runs.confined)
        outputs = [
            _pair(firsts[number], seconds[number], there.places, runs)
            for number in equation.outputs
        ]
        pairs += outputs
        is_confined = all(runs.confined[count:])
        entered = None if is_confined else _inside(equation.eqn, values, there, runs)
        if entered is None:
            _note(equation.eqn, values, outputs, there, runs)
        else:
            for one, other in zip(entered, outputs, strict=True):
                _note(equation.eqn, [one], [other], there, runs, is_moving=True)
    return [read(one) for one in traced.outputs]


def _note(
    eqn: Any,
    inputs: Sequence[Pair],
    outputs: Sequence[Pair],
    there: _Place,
    runs: Runs,
    *,
    is_moving: bool = False,
) -> None:
    runs.steps.append(
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


def _inside(
    eqn: Any, values: list[Pair], there: _Place, runs: Runs
) -> list[Pair] | None:
    """Evaluates a loop or branch step by step; None for any other equation."""
    if eqn.primitive is primitives.scan_p:
        return _scan(eqn, values, there, runs)
    if eqn.primitive is primitives.while_p:
        return _while(eqn, values, there, runs)
    if eqn.primitive is primitives.cond_p:
        return _branch(eqn, values, there, runs)
    return None


def _scan(eqn: Any, values: list[Pair], there: _Place, runs: Runs) -> list[Pair]:
    scan = equations.Scan.of(eqn)
    consts, carry, scanned = scan.of_inputs(values)
    is_along = any(
        there.places.lead(_differing(one.first, one.second))
        for one in scanned
        if one.number is not None
    )
    body, numbers = TracedValues.of(scan.body, QUICK), range(scan.length)
    stacks: list[list[Pair]] = []
    for number in reversed(numbers) if scan.reverse else numbers:
        places = there.places
        if is_along:
            places = places.in_step(number, scan.length)
        inner = there.in_step(number, places)
        slices = [
            _pair(one.first[number], one.second[number], places, runs)
            for one in scanned
        ]
        for whole, one in zip(scanned, slices, strict=True):
            _note(eqn, [whole], [one], inner, runs, is_moving=True)
        outputs = _body(body, [*consts, *carry, *slices], inner, runs)
        carry, stacked = scan.of_outputs(outputs)
        stacks.append(stacked)
    if scan.reverse:
        stacks.reverse()
    made = []
    for each in zip(*stacks, strict=True):
        first, second = (jnp.stack([one[run] for one in each]) for run in (0, 1))
        made.append(_pair(first, second, there.places, runs))
        _note(eqn, each, made[-1:], there, runs, is_moving=True)
    return [*carry, *made]


def _while(
    eqn: Any, values: list[Pair], there: _Place, runs: Runs
) -> list[Pair] | None:
    """Evaluates a while loop; None if only one of the runs goes on at a step."""
    loop = equations.While.of(eqn)
    of_condition, of_body, carry = loop.of_inputs(values)
    if loop.condition.out_avals[0].shape:
        return None  # Under `jax.vmap`, rows stop one by one.
    goes_on = core.jaxpr_as_fun(loop.condition)
    body = TracedValues.of(loop.body, QUICK)
    for number in itertools.count():
        conditions = [
            bool(goes_on(*[one[run] for one in (*of_condition, *carry)])[0])
            for run in (0, 1)
        ]
        if conditions == [False, False]:
            return carry
        if conditions != [True, True]:
            return None
        carry = _body(body, [*of_body, *carry], there.in_step(number), runs)
    raise AssertionError("a loop without an end")


def _branch(
    eqn: Any, values: list[Pair], there: _Place, runs: Runs
) -> list[Pair] | None:
    """Evaluates the branch that is taken; None if the runs take different ones."""
    index, *operands = values
    if index.number is not None:
        return None
    branches = equations.Cond.of(eqn).branches
    taken = int(np.clip(int(index.first), 0, len(branches) - 1))
    return _body(TracedValues.of(branches[taken], QUICK), operands, there, runs)


def _differing(first: Any, second: Any) -> np.ndarray:
    return differences.differing(differences.data(first), differences.data(second))

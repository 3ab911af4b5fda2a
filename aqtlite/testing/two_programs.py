"""The first equation of two programs whose results differ.

Both programs compute the same function of other shapes: of a whole batch and of some
rows, of a sequence and of some positions with a cache. They return all of their values
(`traced_values`), their equations are aligned by scope and primitive, and values are
compared where they overlap (`Overlaps`). The equation that is looked for reads equal
values, and its results differ.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import equations, module_scopes, scopes
from aqtlite.program import injected
from aqtlite.program.plan_table import NO_SCOPE
from aqtlite.shapes.sharding import describe as type_of
from aqtlite.testing import differences
from aqtlite.testing.traced_values import Constant, Equation, Read, TracedValues

Overlaps = Callable[
    [tuple[int, ...], tuple[int, ...]], Iterator[tuple[tuple[Any, ...], ...]]
]
"""Function of the shapes of a value in both programs, which yields the indices of the
elements that may be the same, in the first and in the second. A shape does not say
which of its axes is the batch: values are equal if they are so in any reading."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program and its inputs."""

    jaxpr: core.ClosedJaxpr
    inputs: Sequence[Any]


def describe(first: Program, second: Program, overlaps: Overlaps) -> str:
    """Names the first equation whose results differ, in one sentence.

    Args:
        first: a program.
        second: another one of the same function.
        overlaps: which elements of values of both are the same.
    """
    runs = [
        _Run.of(one.jaxpr, TracedValues.of(one.jaxpr), one.inputs)
        for one in (first, second)
    ]
    found = _first(*runs, overlaps, "", ()) or _alone(*runs, overlaps)
    if found is None:
        return (
            "Programs that return their values give no such difference: it comes from "
            "operations that are compiled together. aqtlite.invariant keeps them apart"
        )
    return (
        f"The first equation whose result differs is {found.eqn.primitive.name} of "
        f"{_types(found.eqn)} at {found.where}, in {found.difference}"
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """A program and its values."""

    closed: core.ClosedJaxpr
    traced: TracedValues
    inputs: Sequence[Any]
    values: list[Any]

    @classmethod
    def of(
        cls, closed: core.ClosedJaxpr, traced: TracedValues, inputs: Sequence[Any]
    ) -> "_Run":
        """Runs a program."""
        return cls(closed, traced, inputs, traced.run(*inputs))

    def value(self, read: Read) -> Any:
        """Returns a value that an equation reads."""
        return read.value if isinstance(read, Constant) else self.values[read]


@dataclasses.dataclass(frozen=True)
class _Found:
    """An equation whose results differ."""

    eqn: Any
    where: str
    difference: str


def _first(
    one: _Run, other: _Run, overlaps: Overlaps, scope: str, loops: tuple[int, ...]
) -> _Found | None:
    """Finds the first equation that reads equal values, and whose results differ."""
    equal: dict[Read, Read] = {}
    numbers = range(len(one.inputs)), range(len(other.inputs))
    if len(numbers[0]) == len(numbers[1]):
        equal.update(
            (a, b)
            for a, b in zip(*numbers, strict=True)
            if _difference(one.values[a], other.values[b], overlaps) is None
        )
    for first, second in _aligned(one.traced.equations, other.traced.equations):
        found = [
            _difference(one.values[a], other.values[b], overlaps)
            for a, b in zip(first.outputs, second.outputs, strict=True)
        ]
        reads = list(zip(first.inputs, second.inputs, strict=False))
        for (a, b), text in zip(
            zip(first.outputs, second.outputs, strict=True), found, strict=True
        ):
            if text is None:
                equal[a] = b
        texts = [text for text in found if text]
        if not texts or not all(_are_equal(a, b, equal) for a, b in reads):
            continue
        there = scopes.join(scope, first.scope)
        inner = _inside(one, other, first, second, overlaps, there, loops)
        return inner or _Found(first.eqn, _shown(there, loops), texts[0])
    return None


def _are_equal(one: Read, other: Read, equal: dict[Read, Read]) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return True
    return not isinstance(one, Constant) and equal.get(one) == other


def _aligned(
    one: Sequence[Equation], other: Sequence[Equation]
) -> Iterator[tuple[Equation, Equation]]:
    """Yields the equations that both programs have, in program order."""
    keys = [[_key(each) for each in each_one] for each_one in (one, other)]
    if keys[0] == keys[1]:
        yield from zip(one, other, strict=True)
        return
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    for start, its_start, count in matcher.get_matching_blocks():
        for i in range(count):
            yield one[start + i], other[its_start + i]


def _key(equation: Equation) -> tuple[Any, ...]:
    made = tuple((var.aval.dtype, var.aval.ndim) for var in equation.eqn.outvars)
    path = scopes.parse(equation.scope).path
    return equation.eqn.primitive.name, path, made, len(equation.inputs)


def _inside(
    one: _Run,
    other: _Run,
    first: Equation,
    second: Equation,
    overlaps: Overlaps,
    scope: str,
    loops: tuple[int, ...],
) -> _Found | None:
    """Looks for the equation in the steps of a scan, or in the branch that is taken."""
    pairs = [
        [run.value(read) for read in equation.inputs]
        for run, equation in ((one, first), (other, second))
    ]
    if first.eqn.primitive is primitives.scan_p:
        return _in_scan(first.eqn, second.eqn, *pairs, overlaps, scope, loops)
    if first.eqn.primitive is primitives.cond_p:
        (index, *inputs), (_, *others) = pairs
        branches = [equations.Cond.of(x.eqn).branches for x in (first, second)]
        taken = int(np.clip(int(index), 0, len(branches[0]) - 1))
        bodies = [each[taken] for each in branches]
        runs = [
            _Run.of(body, TracedValues.of(body), values)
            for body, values in zip(bodies, (inputs, others), strict=True)
        ]
        return _first(*runs, overlaps, scope, loops)
    return None


def _in_scan(
    first: Any,
    second: Any,
    inputs: list[Any],
    others: list[Any],
    overlaps: Overlaps,
    scope: str,
    loops: tuple[int, ...],
) -> _Found | None:
    scans = [equations.Scan.of(eqn) for eqn in (first, second)]
    if scans[0].length != scans[1].length:
        return None
    bodies = [TracedValues.of(scan.body) for scan in scans]
    grouped = [
        scan.of_inputs(values)
        for scan, values in zip(scans, (inputs, others), strict=True)
    ]
    numbers = range(scans[0].length)
    for number in reversed(numbers) if scans[0].reverse else numbers:
        runs = []
        for i, (scan, body) in enumerate(zip(scans, bodies, strict=True)):
            consts, carry, scanned = grouped[i]
            values = [*consts, *carry, *(x[number] for x in scanned)]
            runs.append(_Run.of(scan.body, body, values))
        found = _first(*runs, overlaps, scope, (*loops, number))
        if found:
            return found
        for i, (scan, run) in enumerate(zip(scans, runs, strict=True)):
            outputs = [run.value(read) for read in run.traced.outputs]
            consts, _, scanned = grouped[i]
            grouped[i] = consts, scan.of_outputs(outputs)[0], scanned
    return None


def _alone(one: _Run, other: _Run, overlaps: Overlaps) -> _Found | None:
    """Finds an equation that differs in programs that return it beside the results.

    Programs that return all of their values keep apart what is otherwise compiled
    together. Equations are halved, as if all behind the first that differs did, too.
    """
    pairs = list(_aligned(one.traced.equations, other.traced.equations))
    low, high, found = 0, len(pairs), None
    while low < high:
        middle = (low + high) // 2
        first, second = pairs[middle]
        texts = [
            _difference(a, b, overlaps)
            for a, b in zip(_beside(one, first), _beside(other, second), strict=True)
        ]
        text = next(filter(None, texts), None)
        if text is None:
            low = middle + 1
        else:
            high, found = middle, _Found(first.eqn, _shown(first.scope, ()), text)
    return found


def _beside(run: _Run, equation: Equation) -> list[Any]:
    """Runs a program that returns what an equation makes beside its results."""

    def some(*inputs: Any) -> tuple[list[Any], list[Any]]:
        values = run.traced.every(*inputs)
        results = [values[x] for x in run.traced.outputs if isinstance(x, int)]
        return [values[number] for number in equation.outputs], results

    return jax.jit(some)(*run.inputs)[0]


def _difference(one: Any, other: Any, overlaps: Overlaps) -> str | None:
    """Describes the difference of a value; None if there is none, or no overlap."""
    if one.dtype != other.dtype or one.ndim != other.ndim:
        return None
    first, second = (differences.data(x) for x in (one, other))
    text = None
    for at, there in overlaps(first.shape, second.shape):
        a, b = first[at], second[there]
        differs = differences.differing(a, b)
        if not differs.any():
            return None
        text = f"{differs.sum()} of {differs.size} elements"
    return text


def _shown(scope: str, loops: tuple[int, ...]) -> str:
    path = module_scopes.resolved(
        injected.without_mark(scopes.parse(scope).path)
    ).path
    steps = "".join(f", step {number} of a loop" for number in loops)
    return (repr(path) if path else NO_SCOPE) + steps


def _types(eqn: Any) -> str:
    return ", ".join(type_of(atom.aval) for atom in eqn.invars)


def products(choices: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yields indices of the elements along all axes, from pairs for each axis.

    Args:
        choices: for each axis, pairs of the places in the first and in the second.
    """
    for chosen in itertools.product(*choices):
        yield tuple(
            np.ix_(*(np.asarray(pair[i]) for pair in chosen)) if chosen else ()
            for i in (0, 1)
        )

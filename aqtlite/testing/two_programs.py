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

from aqtlite import errors
from aqtlite.jaxpr import equations, module_scopes, scopes
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
    runs = [_Run.of(TracedValues.of(one.jaxpr), one.inputs) for one in (first, second)]
    found = None
    for agree in (_are_equal, lambda *reads: True):
        found = found or _first(runs[0], runs[1], _Search(overlaps, agree))
    found = found or _alone(runs[0], runs[1], overlaps)
    if found is None:
        return (
            "Programs that return their values give no such difference: it comes from "
            "operations that are compiled together. aqtlite.invariant keeps them apart"
        )
    return (
        f"The first equation whose result differs is {found.equation}, in "
        f"{found.difference}"
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """A program and its values."""

    traced: TracedValues
    inputs: Sequence[Any]
    values: list[Any]

    @classmethod
    def of(cls, traced: TracedValues, inputs: Sequence[Any]) -> "_Run":
        """Runs a program."""
        return cls(traced, inputs, traced.run(*inputs))

    def value(self, read: Read) -> Any:
        """Returns a value that an equation reads."""
        return read.value if isinstance(read, Constant) else self.values[read]


@dataclasses.dataclass(frozen=True)
class _Found:
    """An equation whose results differ."""

    equation: str
    difference: str


Pairs = set[tuple[Read, Read]]


@dataclasses.dataclass(frozen=True)
class _Search:
    """What is looked for, and where."""

    overlaps: Overlaps
    agree: Callable[[Read, Read, Pairs], bool]
    """Whether values that an equation reads are those of the other program, given the
    pairs of values that are."""

    scope: str = ""
    loops: tuple[int, ...] = ()

    def inside(self, equation: Equation) -> "_Search":
        """The search in the bodies of an equation."""
        scope = scopes.join(self.scope, equation.scope)
        return dataclasses.replace(self, scope=scope)


def _first(one: _Run, other: _Run, search: _Search) -> _Found | None:
    """Finds the first equation that reads equal values, and whose results differ."""
    equal = _equal_inputs(one, other, search.overlaps)
    for first, second in _aligned(one.traced.equations, other.traced.equations):
        if not first.inputs:
            continue  # An iota: positions, counted from another one.
        texts = []
        for a, b in zip(first.outputs, second.outputs, strict=True):
            text = _difference(one.values[a], other.values[b], search.overlaps)
            if text == _EQUAL:
                equal.add((a, b))
            elif text:
                texts.append(text)
        reads = zip(first.inputs, second.inputs, strict=True)
        if texts and all(search.agree(*read, equal) for read in reads):
            found = _inside(one, other, first, second, search.inside(first))
            scope = scopes.join(search.scope, first.scope)
            return found or _Found(_text(first.eqn, scope, search.loops), texts[0])
    return None


def _equal_inputs(one: _Run, other: _Run, overlaps: Overlaps) -> Pairs:
    """Returns which inputs of both programs are the same, in their order."""
    equal: Pairs = set()
    start, count = 0, len(other.inputs)
    for a in range(len(one.inputs)):
        for b in range(start, count):
            if _difference(one.values[a], other.values[b], overlaps) == _EQUAL:
                equal.add((a, b))
                start = b + 1
                break
    return equal


def _are_equal(one: Read, other: Read, equal: Pairs) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return True
    return (one, other) in equal


def _aligned(
    one: Sequence[Equation], other: Sequence[Equation]
) -> Iterator[tuple[Equation, Equation]]:
    """Yields the equations that both programs have, in program order."""
    keys = [[_key(each) for each in each_one] for each_one in (one, other)]
    if keys[0] == keys[1]:
        yield from zip(one, other, strict=True)
        return
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for start, its_start, count in matcher.get_matching_blocks():
        for i in range(count):
            yield one[start + i], other[its_start + i]


def _key(equation: Equation) -> tuple[Any, ...]:
    made = tuple((var.aval.dtype, var.aval.ndim) for var in equation.eqn.outvars)
    path = scopes.parse(equation.scope).path
    return equation.eqn.primitive.name, path, made, len(equation.inputs)


def _inside(
    one: _Run, other: _Run, first: Equation, second: Equation, search: _Search
) -> _Found | None:
    """Looks for the equation in the steps of a scan, or in the branch that is taken."""
    inputs = [one.value(read) for read in first.inputs]
    others = [other.value(read) for read in second.inputs]
    if first.eqn.primitive is primitives.scan_p:
        scans = [equations.Scan.of(x.eqn) for x in (first, second)]
        return _in_scan(scans[0], scans[1], inputs, others, search)
    if first.eqn.primitive is primitives.cond_p:
        (index, *inputs), (_, *others) = inputs, others
        branches = [equations.Cond.of(x.eqn).branches for x in (first, second)]
        taken = int(np.clip(int(index), 0, len(branches[0]) - 1))
        runs = [
            _Run.of(TracedValues.of(each[taken]), values)
            for each, values in zip(branches, (inputs, others), strict=True)
        ]
        return _first(runs[0], runs[1], search)
    return None


def _in_scan(
    first: equations.Scan,
    second: equations.Scan,
    inputs: list[Any],
    others: list[Any],
    search: _Search,
) -> _Found | None:
    """Looks for the equation step by step; not where numbers of steps differ."""
    if first.length != second.length:
        return None
    scans = first, second
    bodies = [TracedValues.of(scan.body) for scan in scans]
    grouped = [
        scan.of_inputs(values)
        for scan, values in zip(scans, (inputs, others), strict=True)
    ]
    carries = [carry for _, carry, _ in grouped]
    numbers = range(first.length)
    for number in reversed(numbers) if first.reverse else numbers:
        runs = [
            _Run.of(body, [*consts, *carry, *(x[number] for x in scanned)])
            for body, (consts, _, scanned), carry in zip(
                bodies, grouped, carries, strict=True
            )
        ]
        step = dataclasses.replace(search, loops=(*search.loops, number))
        found = _first(runs[0], runs[1], step)
        if found:
            return found
        carries = [
            scan.of_outputs([run.value(read) for read in run.traced.outputs])[0]
            for scan, run in zip(scans, runs, strict=True)
        ]
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
        text = next(filter(None, texts), _EQUAL)
        if text == _EQUAL:
            low = middle + 1
        else:
            high, found = middle, _Found(shown(first), text)
    return found


def _beside(run: _Run, equation: Equation) -> list[Any]:
    """Runs a program that returns what an equation makes beside its results."""

    def some(*inputs: Any) -> tuple[list[Any], list[Any]]:
        values = run.traced.every(*inputs)
        results = [values[x] for x in run.traced.outputs if isinstance(x, int)]
        return [values[number] for number in equation.outputs], results

    return jax.jit(some)(*run.inputs)[0]


_EQUAL = ""


def _difference(one: Any, other: Any, overlaps: Overlaps) -> str | None:
    """Describes the difference of a value: `_EQUAL`, or None if nothing overlaps."""
    if one.dtype != other.dtype or one.ndim != other.ndim:
        return None
    first, second = (differences.data(x) for x in (one, other))
    text = None
    for at, there in overlaps(first.shape, second.shape):
        differs = differences.differing(first[at], second[there])
        if not differs.any():
            return _EQUAL
        text = f"{differs.sum()} of {differs.size} elements"
    return text


def shown(equation: Equation) -> str:
    """Returns the primitive, types and path of an equation."""
    return _text(equation.eqn, equation.scope, ())


def _text(eqn: Any, scope: str, loops: tuple[int, ...]) -> str:
    path = module_scopes.resolved(scopes.parse(scope).path).path
    types = ", ".join(type_of(atom.aval) for atom in eqn.invars)
    steps = "".join(f", step {number} of a loop" for number in loops)
    return f"{eqn.primitive.name} of {types} at {errors.quoted(path)}{steps}"


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

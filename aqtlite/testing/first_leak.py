"""Which contraction first makes places depend on others.

The program runs on both inputs and returns all of its values (`two_runs`). A value is
*clean* if it differs at changed places only, and also if equations that mix nothing,
elementwise or moving elements, make it of clean ones. From the result back to its last
clean values is the way that the changes took, and its first equation is where they
left their places.

Values may become clean again: scores of attention see all positions until they are
masked. Such values are on the way to no result.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from aqtlite.shapes.sharding import describe as type_of
from aqtlite.testing import contractions, two_runs
from aqtlite.testing.contractions import Contraction
from aqtlite.testing.places import Places
from aqtlite.testing.two_runs import Runs, Step

_MOVING = frozenset(
    {
        *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice"),
        *("dynamic_update_slice", "expand_dims", "gather", "pad", "reshape", "rev"),
        *("scatter", "slice", "split", "squeeze", "transpose"),
    }
)


def describe(
    closed: core.ClosedJaxpr,
    before: Sequence[Any],
    after: Sequence[Any],
    output: int,
    places: Places,
    noun: str,
    paths: Sequence[str] | None,
) -> str:
    """Says at which contraction changes of the inputs leave their places.

    Args:
        closed: the program.
        before: its inputs.
        after: its inputs, with other values at some places.
        output: index of an output that differs at other places.
        places: the places.
        noun: what the places are.
        paths: paths of its contractions, if scopes do not name them.
    """
    runs, outputs = two_runs.evaluate(closed, before, after, places)
    result = outputs[output]
    if result is None or runs.confined[result]:
        return "A program that returns all of its values gives no such difference"
    for mixes in (_may_mix, lambda step: True):
        way = _way(runs, result, mixes)
        if way:
            found = contractions.find(runs.steps, paths)
            return _sentence(runs.steps, found, way, noun)
    return "It differs as the arguments do"


@dataclasses.dataclass(frozen=True)
class _Way:
    """The way of changes outside of their places."""

    values: frozenset[int]
    start: int
    """Index of its first equation."""

    def takes(self, number: int | None) -> bool:
        """Whether a value is on the way."""
        return number in self.values


def _way(runs: Runs, result: int, mixes: Callable[[Step], bool]) -> _Way | None:
    """Returns the way to a result, None if it is clean.

    Args:
        runs: both runs.
        result: number of the result.
        mixes: whether an equation may make other places differ.
    """
    dirty: set[int] = set()
    makers: dict[int, int] = {}
    for index, step in enumerate(runs.steps):
        spreads = mixes(step) or not dirty.isdisjoint(step.inputs)
        for number in step.outputs:
            if number is None:
                continue
            makers[number] = index
            if spreads and not runs.confined[number]:
                dirty.add(number)
    if result not in dirty:
        return None
    found, ahead, start = {result}, [result], makers[result]
    while ahead:
        maker = makers[ahead.pop()]
        start = min(start, maker)
        inputs = dirty.intersection(runs.steps[maker].inputs) - found
        found |= inputs
        ahead += inputs
    return _Way(frozenset(found), start)


def _may_mix(step: Step) -> bool:
    """Whether results may depend on more than the elements at their own places."""
    eqn = step.eqn
    if step.is_moving or eqn.primitive.name in _MOVING:
        return False
    if any("ax" in name or "dimension" in name for name in eqn.params):
        return True
    made = [var.aval.shape for var in eqn.outvars]
    return any(
        len(atom.aval.shape) not in (0, len(shape))
        or any(
            count not in (1, size)
            for count, size in zip(atom.aval.shape, shape, strict=False)
        )
        for shape in made
        for atom in eqn.invars
    )


def _sentence(
    steps: Sequence[Step], found: Sequence[Contraction], way: _Way, noun: str
) -> str:
    start = steps[way.start]
    for one in found:
        if one.begins <= way.start <= one.ends:
            shared = [x for x in one.operands if way.takes(x.scales)]
            if not shared:
                return (
                    f"The first contraction that mixes {noun} is {one}, in an "
                    f"equation of {_types(start)}"
                )
            what = " and ".join(
                f"{x.side} ({x.type}, scales {x.type_of_scales})" for x in shared
            )
            return (
                "The first contraction whose operands or scales change there is "
                f"{one}: {noun} share the scales of its {what}"
            )
        inputs = {x for step in steps[one.begins : one.ends + 1] for x in step.inputs}
        if one.begins > way.start and not way.values.isdisjoint(inputs):
            sides = [x for x in one.operands if way.takes(x.values)]
            what = "".join(f", {x.side} {x.type}" for x in sides)
            return (
                f"The changes get there in {_equation(start)}. The first contraction "
                f"whose operands change there is {one}{what}"
            )
    return f"The changes get there in {_equation(start)}, and reach no contraction"


def _equation(step: Step) -> str:
    name = step.eqn.primitive.name
    return f"{name} of {_types(step)} at {contractions.shown(step)}"


def _types(step: Step) -> str:
    return ", ".join(type_of(atom.aval) for atom in step.eqn.invars)

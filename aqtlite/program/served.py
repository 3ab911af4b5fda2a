"""Evaluates a traced function with frozen weights in place of float parameters.

Before: `program/program.py`, which made the frozen weights.
Next: the end of the way; `program/serving/planning.py` decides what is frozen.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from aqtlite.jaxpr import analysis
from aqtlite.jaxpr.replacement import Location, Replacement
from aqtlite.operations import Side
from aqtlite.program import program as program_lib
from aqtlite.program import steps as steps_lib
from aqtlite.program.planned_lookup import Planned, PlannedLookup
from aqtlite.program.program import Path, Program
from aqtlite.program.serving import guards, identity
from aqtlite.program.serving.frozen_record import IDENTITY, FrozenEntry
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.statistics import States

Entries = Mapping[Path, Sequence[FrozenEntry]]
"""Frozen weights by the path of their module in the collection."""


class Found(NamedTuple):
    """A frozen weight found for a contraction."""

    name: str
    """Names of its parameters, joined by commas."""

    qtensor: QTensor
    floats: tuple[int, ...]
    """Indices of inputs that are its parameters and stayed in float for other uses."""
    sampled: Any
    """Samples of these floats when they were frozen; None if none were stored."""

    gone: tuple[int, ...]
    """Indices of its other parameters, which are `Placeholder`s."""


def serve(
    program: Program, values: Sequence[Any], frozen: Entries, converter: str
) -> list[Any]:
    """Evaluates a program with frozen weights in place of their floats.

    Args:
        program: the traced call.
        values: inputs of its jaxpr; a `Placeholder` for each frozen parameter.
        frozen: the frozen weights.
        converter: the user's call of the conversion, for messages.

    Returns:
        The outputs of the jaxpr.

    Raises:
        TypeError: if a frozen parameter is differentiated.
        ValueError: if a frozen weight is missing, does not fit, or is beside the float
            that it replaced; or if a frozen parameter has moved or is read as a float.
    """
    gone = {i for i, x in enumerate(values) if isinstance(x, Placeholder)}
    for i in sorted(gone):
        parameter, converted = program.parameters[i], values[i].number
        guards.check_place(str(parameter), parameter.number, converted, converter)
    floats = {str(one) for i, one in program.parameters.items() if i not in gone}
    for entries in frozen.values():
        for entry in entries:
            guards.check_not_beside_floats(entry.record, floats, converter)
    found = {
        one.site.location: find(program, one, gone, frozen.get(module, ()), converter)
        for one, module, _ in program.numbered()
    }
    _check_read(program, found, gone, frozen, converter)
    for weights in found.values():
        weights.update(
            {
                k: _untrained(program, _compared(one, values, converter), values)
                for k, one in weights.items()
            }
        )
    replacements = {}
    for one in program.plan.operations():
        weights = found[one.site.location]
        beside = {s: weight.name for s, weight in weights.items() if weight.floats}
        frozen_weights = {side: weight.qtensor for side, weight in weights.items()}
        replacements[one.site.location] = _replacement(
            program, one, beside, frozen_weights
        )
    for one in program.plan.replaced():
        if not one.is_quantized:
            replacements[one.site.location] = one.replacement(program.states_of(one))
    arrays = program_lib.arrays(values)
    return program.with_replaced(arrays, replacements)[0]


def _compared(weight: Found, values: Sequence[Any], converter: str) -> Found:
    """Returns a weight after comparing its floats, as `guards.unless_stale`."""
    if not weight.floats or weight.sampled is None:
        return weight
    floats = [lax.stop_gradient(jnp.asarray(values[i])) for i in weight.floats]
    is_same = identity.same_parameters(floats, weight.sampled)
    qtensor = guards.unless_stale(weight.name, weight.qtensor, is_same, converter)
    return weight._replace(qtensor=qtensor)


def _untrained(program: Program, weight: Found, values: Sequence[Any]) -> Found:
    """Returns a weight that refuses gradients of its parameters that are gone."""
    scale = weight.qtensor.scale
    for i in weight.gone:
        name = str(program.parameters[i])
        scale = guards.untrained(name, scale, values[i].marker)
    qtensor = dataclasses.replace(weight.qtensor, scale=scale)
    return weight._replace(qtensor=qtensor)


def find(
    program: Program,
    one: Planned,
    gone: Set[int],
    frozen: Sequence[FrozenEntry],
    converter: str,
) -> dict[Side, Found]:
    """Finds the frozen weights of a contraction or lookup among those of its module.

    Args:
        program: the traced call.
        one: the contraction, or the lookup.
        gone: inputs of the jaxpr that are frozen parameters.
        frozen: the frozen weights of its module.
        converter: the user's call of the conversion, for messages.
    """
    found: dict[Side, Found] = {}
    call, per_step = program.contraction_of_types(one), steps_lib.frozen_per_step(one)
    if per_step is None:
        return found
    # Leading axes of weights that hold one for each step of a scan.
    steps = tuple(itertools.compress(one.site.lengths, per_step))
    for side, origin in one.origins.items():
        operand = call.operand(side)
        name = _name(program, origin.inputs)
        similar = [(name, entry) for entry in identified(program, one, side, frozen)]
        floats = program.parameters.keys() & origin.inputs - gone
        by_number = tuple(sorted(floats, key=program.parameters.__getitem__))
        for entry in guards.fitting(similar, call.cfg, operand, steps, converter):
            qtensor, sampled = entry.values[side], entry.values.get(IDENTITY)
            others = tuple(sorted(gone & origin.inputs))
            found[side] = Found(name, qtensor, by_number, sampled, others)
    return found


def identified(
    program: Program, one: Planned, side: Side, frozen: Iterable[FrozenEntry]
) -> Iterator[FrozenEntry]:
    """Yields the frozen weights that are computed as an operand is.

    Args:
        program: a call of the model.
        one: the contraction, or the lookup.
        side: the operand.
        frozen: the frozen weights of its module.
    """
    known = one.origins[side].known_as
    contracting = program.contraction_of_types(one).operand(side).contracting
    states = (), program.state_of_weight(one, side)
    for entry in frozen:
        record = entry.record
        if (
            record.operand.side == side
            and record.identity in known
            and record.operand.contracting == contracting
            and record.state in states
        ):
            yield entry


def _check_read(
    program: Program,
    found: Mapping[Location, Mapping[Side, Found]],
    gone: Set[int],
    frozen: Entries,
    converter: str,
) -> None:
    """Raises if a result depends on frozen parameters except through frozen weights."""
    quantized = program.plan.operations()
    unread = {
        one.site.location: {one.index(side) for side in found[one.site.location]}
        for one in quantized
    }
    read = analysis.read_inputs(program.traced.jaxpr, gone, unread)
    if not read:
        return
    records = [(path, one.record) for path, ones in frozen.items() for one in ones]
    for i in sorted(read):
        name = str(program.parameters[i])
        guards.check_has_weight(name, records, converter)
    for one in quantized:
        for side, origin in one.origins.items():
            of_weight = read & origin.needed
            if of_weight and origin.identity and side not in found[one.site.location]:
                name = str(program.parameters[min(of_weight)])
                operand = program.contraction_of_types(one).operand(side)
                where = repr(one.path) if one.path else "the root"
                guards.refuse_another_way(name, operand, where, converter)
    name = str(program.parameters[min(read)])
    guards.refuse_float_read(name, "this call reads it in float", converter)


def _replacement(
    program: Program,
    one: Planned,
    beside: Mapping[Side, str],
    weights: Mapping[Side, QTensor],
) -> Replacement:
    """Returns the replacement of an operation by one with frozen weights.

    Args:
        program: the traced call.
        one: the contraction, or the lookup.
        beside: names of the weights with parameters that stayed in float, by side.
        weights: its frozen weights.
    """
    states, per_step = program.states_of(one), steps_lib.per_step(one)
    if steps_lib.frozen_per_step(one) == per_step:

        def function(values: Sequence[Any], given: Any) -> tuple[Any, None]:
            return _contract(program, one, beside, values, *given), None

        return Replacement(function, (weights, states), per_step=per_step)

    def with_shared_weights(values: Sequence[Any], states: Any) -> tuple[Any, None]:
        return _contract(program, one, beside, values, weights, states), None

    return Replacement(with_shared_weights, states, per_step=per_step)


def _contract(
    program: Program,
    one: Planned,
    beside: Mapping[Side, str],
    values: Sequence[Any],
    weights: Mapping[Side, QTensor],
    states: States,
) -> Sequence[Any]:
    """Contracts, or looks up, with frozen weights.

    Args:
        program: the traced call.
        one: the contraction, or the lookup.
        beside: as in `_replacement`.
        values: inputs of its equation.
        weights: its frozen weights.
        states: the states of its calibrations.
    """
    call = program.contraction(one, values, states)
    operands: dict[Side, Any] = {"lhs": call.lhs, "rhs": call.rhs}
    for side, weight in weights.items():
        if side in beside:
            weight = guards.without_gradient(beside[side], weight, operands[side])
        operands[side] = weight
    if isinstance(one, PlannedLookup):
        indices, _, *rest = one.in_order(values)
        if "rhs" in weights:
            return one.contract(one.cfg, [indices, operands["rhs"], *rest], states)
        return one.contract(one.cfg, one.in_order(values), states)
    inputs = [operands["lhs"], operands["rhs"], *values[2:]]
    return one.contract(call.cfg, inputs, call.states)


def _name(program: Program, needed: Set[Any]) -> str:
    """Returns the names of the parameters among the inputs of a weight."""
    numbers = program.parameters.keys() & needed
    return ", ".join(map(str, sorted(program.parameters[i] for i in numbers)))

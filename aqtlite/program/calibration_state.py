"""Calibration states of a quantized function, and evaluation with them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import errors
from aqtlite.jaxpr.replacement import Aux, Location, Replacement
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.program import Program
from aqtlite.quantization.states import statistics
from aqtlite.quantization.states.state_collections import (
    ADAPTER,
    DROPOUT,
    OF_CONVERSION,
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
    collections_of,
)
from aqtlite.quantization.states.statistics import States
from aqtlite.quantization.states.stored_statistics import restored_statistics

_NONE: Mapping[Location, Any] = MappingProxyType({})

State = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""States keyed by collection, contraction path, and field of `statistics.States`."""

Left = Iterator[tuple[PlannedContraction, str, dict[str, Any]]]
"""Contractions, each with a collection and its states in it."""


def with_gradient_statistics(state: State, gradient: State) -> dict[str, Any]:
    """Returns a state with the new statistics of output gradients.

    Args:
        state: state that the quantized function returned.
        gradient: gradient with respect to the state, from `jax.grad`.

    Raises:
        ValueError: if the gradient has no statistics.
    """
    if OF_GRADIENTS not in gradient:
        raise ValueError(
            "with_gradient_statistics(state, gradient) takes the gradient with respect "
            f"to a state that has {OF_GRADIENTS!r}, as init_state returns it for "
            "configs with statistics of output gradients; got one of "
            f"{', '.join(map(repr, sorted(gradient))) or 'nothing'}"
        )
    return {**state, OF_GRADIENTS: gradient[OF_GRADIENTS]}


def initializing(
    planned: Plan, adapters: Mapping[Location, Any]
) -> dict[Location, Replacement]:
    """Returns replacements that evaluate contractions and leave their initial states.

    If there are learned scales, all contractions are quantized and have their adapters:
    these scales start from the operands seen in training. Initial statistics do not
    depend on values.

    Args:
        planned: plan of the program.
        adapters: initial parameters of adapters, by contraction.

    Returns:
        Replacements by location.
    """
    ones = planned.every_replaced()
    are_learned = any(PARAMETERS in collections_of(one.cfg) for one in ones)
    made = {}
    for one in ones:
        location = one.site.location
        adapter = adapters.get(location, ())
        if isinstance(one, PlannedContraction) and collections_of(one.cfg):
            made[location] = _leaving_first_states(one, adapter, are_learned)
        elif are_learned:
            made[location] = one.replacement(States(adapter=adapter))
    return made


def init(
    program: Program, values: Sequence[Any], adapters: Mapping[Location, Any]
) -> Left:
    """Yields the initial states of a program's contractions, as `left`.

    Args:
        program: the program.
        values: inputs of its jaxpr.
        adapters: initial parameters of adapters, by contraction.
    """

    def run(values: Sequence[Any], parameters: Sequence[Any]) -> Aux:
        given = dict(zip(adapters, parameters, strict=True))
        replacements = initializing(program.plan, given)
        return program.with_replaced(values, replacements)[1]

    ones = program.plan.replaced()
    has_calibrations = any(collections_of(one.cfg) for one in ones)
    aux = jax.jit(run)(values, [*adapters.values()]) if has_calibrations else {}
    return left(program.plan, aux, adapters)


def first(
    program: Program, values: Sequence[Any], adapters: Mapping[Location, Any]
) -> dict[str, Any]:
    """Returns the state before the first call; the arguments are those of `init`."""
    state: dict[str, Any] = {}
    for one, collection, entry in init(program, values, adapters):
        state.setdefault(collection, {})[one.kept_as] = entry
    return state


def left(planned: Plan, aux: Aux, adapters: Mapping[Location, Any] = _NONE) -> Left:
    """Yields the states that contractions left, each with its collection.

    Args:
        planned: plan of the program.
        aux: the states, by location.
        adapters: parameters of adapters to yield among them.
    """
    for one in planned.replaced():
        states = aux.get(one.site.location)
        adapter = adapters.get(one.site.location)
        for collection, fields in one.collections.items():
            found = (
                {}
                if states is None
                else {f: getattr(states, f) for f in fields if f != ADAPTER}
            )
            if adapter is not None and ADAPTER in fields:
                found[ADAPTER] = adapter
            if found:
                yield one, collection, found


def _leaving_first_states(
    one: PlannedContraction, adapter: Any, is_quantized: bool
) -> Replacement:
    def function(values: Sequence[Any], given: States) -> tuple[Sequence[Any], States]:
        first = _first_states(one, values)._replace(adapter=given.adapter)
        if not is_quantized:
            return one.in_float(values), first
        now = first
        if STATISTICS in collections_of(one.cfg):
            now = states_after(one, values, first)
        return one.contract(one.cfg, one.in_order(values), now), first

    states = states_of_zeros(one)._replace(adapter=adapter)
    return Replacement(function, states, has_aux=True, per_step=one.site.per_step)


def _first_states(one: PlannedContraction, values: Sequence[Any]) -> States:
    lhs, rhs, *_ = one.in_order(values)
    return statistics.init_states(one.cfg, lhs, rhs, one.operation(values))


def states_of_zeros(one: PlannedContraction) -> States:
    """Returns initial states from operands of zeros, stacked over scan steps.

    For contractions that the initializing call does not evaluate.
    """
    avals = [atom.aval for atom in one.site.eqn.invars]
    states = _first_states(one, [jnp.zeros(x.shape, x.dtype) for x in avals])
    steps = tuple(itertools.compress(one.site.lengths, one.site.per_step))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*steps, *jnp.shape(x))), states)


def _gathers(one: PlannedContraction) -> bool:
    return STATISTICS in collections_of(one.cfg)


def updating(one: Planned, states: States) -> Replacement:
    """Returns a replacement that contracts quantized and leaves updated statistics."""
    if not isinstance(one, PlannedContraction) or not _gathers(one):
        return one.replacement(states)

    def function(values: Sequence[Any], states: States) -> tuple[Sequence[Any], States]:
        after = states_after(one, values, states)
        return one.contract(one.cfg, one.in_order(values), after), after

    return Replacement(function, states, has_aux=True, per_step=one.site.per_step)


def gathering(one: Planned, states: States) -> Replacement:
    """Returns a replacement that contracts in float and leaves updated statistics."""

    def in_float(values: Sequence[Any], states: States) -> tuple[Sequence[Any], None]:
        return one.in_float(values, states), None

    if not isinstance(one, PlannedContraction) or not _gathers(one):
        return Replacement(in_float, states, per_step=one.site.per_step)

    def function(values: Sequence[Any], states: States) -> tuple[Sequence[Any], States]:
        return one.in_float(values, states), states_after(one, values, states)

    return Replacement(function, states, has_aux=True, per_step=one.site.per_step)


def check_not_serving(states: Any, has_frozen: bool) -> None:
    """Raises ValueError if statistics were to be gathered by a program that serves.

    Args:
        states: tree of statistics; None without any.
        has_frozen: whether weights of the program are frozen.
    """
    statistics.check_takes_batches(states)
    if has_frozen:
        raise ValueError(
            "statistics were to be gathered, and weights are frozen: gather them with "
            "the variables of training, and convert again"
        )


def states_after(
    one: PlannedContraction, values: Sequence[Any], states: States
) -> States:
    """Returns the states of a contraction updated with the statistics of this batch."""
    lhs, rhs, *_ = one.in_order(values)
    return statistics.update_states(
        one.cfg, states, lhs, rhs, one.operation(values), repr(one.path)
    )


def states_of(one: PlannedContraction, state: State) -> States:
    """Returns the states of a contraction from the state of a function.

    Raises:
        ValueError: if the state has no entry for it.
    """
    found: dict[str, Any] = {}
    for collection, fields in one.collections.items():
        entry = state.get(collection, {}).get(one.kept_as, {})
        if set(fields) - set(entry) - OF_CONVERSION - {ADAPTER}:
            raise ValueError(
                f"the state has nothing for the contraction {errors.quoted(one.path)} "
                f"in {collection!r}: make it with init_state and the arguments, rules "
                "and function of the call; for an NNX model, "
                "aqtlite.flax.nnx.calibrate(model, batches) makes and gathers it"
            )
        entry = restored_statistics(entry)
        found.update({field: entry[field] for field in fields if field in entry})
    return States(**found)


def updated(state: State, planned: Plan, aux: Aux) -> dict[str, Any]:
    """Returns the state with the statistics that contractions left."""
    after: dict[str, Any] = {
        name: entries if name == DROPOUT else dict(entries)
        for name, entries in state.items()
    }
    for one, collection, entry in left(planned, aux):
        if collection == STATISTICS:
            after[STATISTICS][one.kept_as] = entry
    return after


def is_state(x: Any) -> bool:
    """Whether `x` is a state, not parameters in a collection "params"."""
    collections = {PARAMETERS, STATISTICS, OF_GRADIENTS}
    if not isinstance(x, Mapping) or not x.keys() <= {*collections, DROPOUT}:
        return False
    return all(
        isinstance(by_path, Mapping) and all(map(_is_entry, by_path.values()))
        for name, by_path in x.items()
        if name != DROPOUT
    )


def is_filled(state: State) -> bool:
    """Whether a state has any entries."""
    return any(bool(entries) for name, entries in state.items() if name != DROPOUT)


def _is_entry(x: Any) -> bool:
    return isinstance(x, Mapping) and x.keys() <= set(States._fields)

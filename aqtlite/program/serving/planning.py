"""Plans a conversion: the weights to freeze, their names and identities."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from aqtlite.program.serving import weights as weights_lib
from aqtlite.program.serving.framework import Model
from aqtlite.program.serving.model import (
    Discovery,
    FoundOperand,
    Parameter,
)
from aqtlite.program.serving.placeholder import Placeholder, sliced_axes
from aqtlite.program.serving.weight import Member, Refusal, Weight

_Refusals = dict[Member, Refusal]
"""Reasons why operands are not frozen."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, planned from traces alone."""

    model: Model
    discoveries: list[Discovery]
    recorded: list[Weight]
    """Weights of all calls, including those refused while planning."""

    weights: tuple[Weight, ...]
    removed: frozenset[Parameter]
    """Parameters that only frozen weights read."""

    refusals: Mapping[Member, Refusal]
    """Reasons why operands are not frozen."""

    def placeholders(self) -> dict[Parameter, Placeholder]:
        """Returns the placeholders of the removed parameters."""
        return _placeholders(self.removed, self.weights)

    def keep_float(self, paths: Collection[tuple[str, ...]]) -> "Plan":
        """Returns a plan that leaves some weights in float; others keep their names.

        Args:
            paths: `Weight.path` of the weights to leave.
        """
        why = Refusal("it was to be kept in float", is_expected=True)
        refused = {
            member: why
            for weight in self.weights
            if weight.path in paths
            for member in weight.members
        }
        if not refused:
            return self
        refusals = {**self.refusals, **refused}
        names = {weight.index: weight.name for weight in self.weights}
        return _settle(self.model, self.discoveries, self.recorded, refusals, names)


def plan(model: Model) -> Plan:
    """Plans the conversion of a model for its calls.

    Raises:
        ValueError: if no contraction is quantized, or as in `weights.chosen`.
    """
    calls = range(model.num_calls)
    discoveries = [model.discover(call) for call in calls]
    weights_lib.check_some(discoveries)
    recorded: list[Weight] = []
    refusals: _Refusals = {}
    for call, one in enumerate(discoveries):
        keys, not_weights = weights_lib.chosen(model, one.operands)
        weights = [found for found in one.operands if found.key in keys]
        weights = weights_lib.with_all_moments(discoveries, weights)
        if weights:
            recorded.extend(weights_lib.record_weights(model, call, weights))
        refusals.update({(call, key): why for key, why in not_weights.items()})
    refusals.update(_copies(recorded))
    return _settle(model, discoveries, recorded, refusals, {})


def _settle(
    model: Model,
    discoveries: list[Discovery],
    recorded: list[Weight],
    refusals: Mapping[Member, Refusal],
    names: Mapping[tuple[int, int], str],
) -> Plan:
    """Refuses weights until serving can tell the rest apart.

    Args:
        model: the model.
        discoveries: operands of each call.
        recorded: weights of all calls.
        refusals: refusals so far.
        names: names by `Weight.index`; empty to choose them.
    """
    refusals = dict(refusals)
    while True:
        kept = [one for one in recorded if one.member not in refusals]
        frozen = {one.member for one in kept}
        floats = [
            operand
            for call, found in enumerate(discoveries)
            for operand in found.operands
            if (call, operand.key) not in frozen
        ]
        removed = _removed(discoveries, kept)
        identified, untold = _identified(model, kept, floats, removed)
        weights, refused = _grouped(model, identified)
        if not (untold or refused):
            break
        refusals.update(untold | refused)
    names = names or _names(weights)
    weights = [dataclasses.replace(one, name=names[one.index]) for one in weights]
    return Plan(model, discoveries, recorded, tuple(weights), removed, refusals)


def _identified(
    model: Model,
    recorded: Sequence[Weight],
    floats: Sequence[FoundOperand],
    removed: frozenset[Parameter],
) -> tuple[list[Weight], _Refusals]:
    """Gives weights what serving finds them by; refuses those that it cannot tell."""
    placeholders = _placeholders(removed, recorded)
    identified: list[Weight] = []
    refused: _Refusals = {}
    for call, ones in itertools.groupby(recorded, lambda one: one.index[0]):
        of_call = list(ones)
        identities = model.identities(call, of_call, placeholders)
        for one, found in zip(of_call, identities, strict=True):
            if isinstance(found, Refusal):
                refused[one.member] = found
                continue
            record = dataclasses.replace(
                one.record,
                identity=found,
                beside_floats=any(_share_a_place(other, one) for other in floats),
                removed=tuple(str(x) for x in one.parameters if x in removed),
            )
            identified.append(dataclasses.replace(one, record=record))
    return identified, refused


def _copies(recorded: Iterable[Weight]) -> _Refusals:
    """Refuses weights with more elements than their parameters: broadcast copies.

    Weights of equal parameters and several states are no copies.
    """
    return {
        one.member: Refusal(
            f"as {one.shape} it is larger than the parameters that it is made of: "
            "they were broadcast, perhaps to a batch, or to the steps of a scan"
        )
        for one in recorded
        if np.prod(one.shape)
        > one.found.num_states * sum(parameter.size for parameter in one.parameters)
    }


def _removed(
    discoveries: list[Discovery], kept: Sequence[Weight]
) -> frozenset[Parameter]:
    """Returns the parameters that no call reads once operands are frozen.

    Weakly typed parameters stay: with a strong dtype they would give other weights.
    """
    made_of = {
        parameter
        for one in kept
        for parameter in one.parameters
        if not parameter.is_weakly_typed
    }
    for call, found in enumerate(discoveries):
        frozen = {one.key for one in kept if one.index[0] == call}
        made_of -= found.read_parameters(frozen)
    return frozenset(made_of)


def _placeholders(
    removed: Iterable[Parameter], recorded: Sequence[Weight]
) -> dict[Parameter, Placeholder]:
    """Returns placeholders for parameters of recorded weights."""
    return {
        parameter: Placeholder(
            parameter.shape,
            parameter.dtype,
            parameter.number,
            sliced_axes(
                parameter.shape,
                [one.shape for one in recorded if parameter in one.parameters],
            ),
            parameter.spec,
        )
        for parameter in removed
    }


def _grouped(
    model: Model, identified: Sequence[Weight]
) -> tuple[list[Weight], _Refusals]:
    """Groups operands into distinct weights, and refuses those that look alike."""
    weights: list[Weight] = []
    refused: _Refusals = {}
    for one in identified:
        for index, weight in enumerate(weights):
            if model.finds_alike(weight, one):
                members = (*weight.members, one.member)
                if not weight.made_like(one):
                    why = Refusal(_why_not_shared(model, weight, one))
                    refused.update(dict.fromkeys(members, why))
                weights[index] = dataclasses.replace(weight, members=members)
                break
        else:
            weights.append(one)
    for weight in weights:
        others = [other for other in weights if other is not weight]
        is_shared = weight.record.beside_floats or any(
            _share_a_place(other, weight) for other in others
        )
        if weight.record.identity is None and is_shared:
            why = Refusal(
                "its parameter is read elsewhere, too, and its module contracts other "
                "operands of this shape"
            )
            refused.update(dict.fromkeys(weight.members, why))
    return weights, refused


def _why_not_shared(model: Model, first: Weight, other: Weight) -> str:
    """Returns why serving cannot tell apart two weights that are not made alike."""
    if first.parameters != other.parameters or first.inputs == other.inputs:
        return "another weight of its module looks the same"
    return model.why_states_differ(first)


def _share_a_place(one: Weight | FoundOperand, other: Weight) -> bool:
    """Whether one module contracts both, with equal shapes, sides and axes."""
    return one.key.path == other.key.path and one.operand.is_like(other.operand)


def _names(weights: Sequence[Weight]) -> dict[tuple[int, int], str]:
    """Names every weight after its parameters; returns names by index."""
    taken = {
        weight.module[: i + 1] for weight in weights for i in range(len(weight.module))
    }
    names = {}
    for weight in weights:
        base = weight.found.name or "+".join(weight.record.made_of)
        name, repeat = base, 0
        while (*weight.module, name) in taken:
            repeat += 1
            name = f"{base}_{repeat}"
        taken.add((*weight.module, name))
        names[weight.index] = name
    return names

"""Planning of a conversion: the weights to freeze, their names and identities."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.program.serving import discovery, identity, recording
from aqtlite.program.serving.discovery import Refusal
from aqtlite.program.serving.frozen_record import IDENTITY, FrozenRecord
from aqtlite.program.serving.model import (
    Buffer,
    Discovery,
    FoundOperand,
    Model,
    Parameter,
)
from aqtlite.program.serving.placeholder import Placeholder, sliced_axes
from aqtlite.program.serving.recording import Member, RecordedWeight

_Refusals = dict[Member, Refusal]
"""By operand."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight to freeze."""

    module: tuple[str, ...]
    """The path of the module that contracts it."""

    name: str
    record: FrozenRecord
    recorded: RecordedWeight
    """One of those that it was found by."""

    members: tuple[Member, ...]
    """The operands that it is."""

    @property
    def path(self) -> tuple[str, ...]:
        """The path of its `QTensor` in the collection "aqt"."""
        return (*self.module, self.name, self.record.operand.side)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters that it is made of."""
        return self.recorded.parameters

    @property
    def sources(self) -> tuple[Parameter, ...]:
        """The parameters, and those that a learned calibration reads."""
        return self.recorded.sources

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The variables that its quantization reads beside its parameters."""
        return self.recorded.buffers

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs of the trace in which it is recorded that are stored."""
        side: str = self.record.operand.side
        outputs = {side: self.recorded.outputs.qtensor}
        if self.record.identity is None:
            outputs[IDENTITY] = self.recorded.outputs.values
        return outputs

    @property
    def compared(self) -> tuple[Parameter, ...]:
        """The parameters that stay beside a weight that is known by a text.

        Samples of them are stored as its `IDENTITY`, to tell whether they are those
        that it was made of.
        """
        removed = self.record.removed
        if not isinstance(self.record.identity, str) or removed is None:
            return ()
        return tuple(one for one in self.parameters if str(one) not in removed)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, planned from traces alone."""

    model: Model
    discoveries: list[Discovery]
    recorded: list[RecordedWeight]
    """Weights of all calls, those that are not frozen included."""

    weights: tuple[Weight, ...]
    removed: frozenset[Parameter]
    """The parameters that nothing reads but frozen weights."""

    refusals: Mapping[Member, Refusal]
    """The reasons why operands are not frozen."""

    def placeholders(self) -> dict[Parameter, Placeholder]:
        """Returns what stands for the parameters that are removed."""
        return _placeholders(self.removed, [one.recorded for one in self.weights])

    def keep_float(self, paths: Collection[tuple[str, ...]]) -> "Plan":
        """Returns a plan that leaves some weights in float.

        Args:
            paths: paths of these weights. The others keep their names.
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
        names = {weight.recorded.index: weight.name for weight in self.weights}
        return _settle(self.model, self.discoveries, self.recorded, refusals, names)


def plan(model: Model) -> Plan:
    """Plans the conversion of a model for its calls.

    Raises:
        ValueError: if there is no quantized contraction, or as `discovery.weights`.
    """
    calls = range(model.num_calls)
    discoveries = [model.discover(call) for call in calls]
    discovery.check_some(discoveries)
    recorded: list[RecordedWeight] = []
    refusals: _Refusals = {}
    for call, one in enumerate(discoveries):
        keys, not_weights = discovery.weights(one.operands)
        weights = [found for found in one.operands if found.key in keys]
        if weights:
            recorded.extend(recording.record_weights(model, call, weights))
        refusals.update({(call, key): why for key, why in not_weights.items()})
    refusals.update(_copies(recorded))
    return _settle(model, discoveries, recorded, refusals, {})


def _settle(
    model: Model,
    discoveries: list[Discovery],
    recorded: list[RecordedWeight],
    refusals: Mapping[Member, Refusal],
    names: Mapping[tuple[int, int], str],
) -> Plan:
    """Refuses weights until those that are left can be told from one another.

    Args:
        model: the model.
        discoveries: for each call.
        recorded: weights of all calls.
        refusals: of operands, so far.
        names: of weights that have one already, by index.
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
        identities = _identities(model, kept, _placeholders(removed, kept))
        groups, refused = _grouped(identities, floats, removed)
        if not refused:
            break
        refusals.update(refused)
    names = names or _names(groups)
    weights = tuple(_weight(one, names, floats, removed) for one in groups)
    return Plan(model, discoveries, recorded, weights, removed, refusals)


_Identified = list[tuple[RecordedWeight, identity.Identity | None]]
"""Weights, and what serving will know them by."""


def _identities(
    model: Model,
    recorded: Sequence[RecordedWeight],
    placeholders: Mapping[Parameter, Placeholder],
) -> _Identified:
    identified: _Identified = []
    for call, ones in itertools.groupby(recorded, lambda one: one.index[0]):
        of_call = list(ones)
        injected = {one.key for one in of_call if one.found.is_injected}
        fingerprints = iter(
            recording.fingerprints(model, call, injected, placeholders)
            if injected
            else ()
        )
        identified += [
            (one, next(fingerprints) if one.found.is_injected else one.found.identity)
            for one in of_call
        ]
    return identified


@dataclasses.dataclass(frozen=True)
class _Group:
    """Records of one weight of one module."""

    members: tuple[Member, ...]
    recorded: RecordedWeight
    identity: identity.Identity | None


def _copies(recorded: Iterable[RecordedWeight]) -> _Refusals:
    """Refuses weights larger than what they are made of."""
    return {
        one.member: Refusal(
            f"as {one.shape} it is larger than the parameters that it is made of: "
            "they were broadcast, perhaps to a batch"
        )
        for one in recorded
        if np.prod(one.shape) > sum(parameter.size for parameter in one.parameters)
    }


def _removed(
    discoveries: list[Discovery], kept: Sequence[RecordedWeight]
) -> frozenset[Parameter]:
    """Returns the parameters that no call reads if some operands are frozen.

    One whose dtype is weak stays: traced in another dtype, it would make other weights.
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
    removed: Iterable[Parameter], recorded: Sequence[RecordedWeight]
) -> dict[Parameter, Placeholder]:
    """Returns what stands for parameters of which weights were made."""
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
    identified: _Identified,
    floats: Sequence[FoundOperand],
    removed: frozenset[Parameter],
) -> tuple[list[_Group], _Refusals]:
    """Returns the distinct weights of each module, and those that look the same."""
    groups: list[_Group] = []
    refused: _Refusals = {}
    for one, found in identified:
        gone = removed.intersection(one.parameters)
        is_static = isinstance(found, str)
        is_whole = len(gone) == len(one.parameters)
        is_told = is_static or (found is not None and is_whole)
        if not is_told and (gone or not one.found.is_injected):
            refused[one.member] = Refusal(
                "what it is made of could not be told at a call: it mixes elements "
                "(by a sum or a contraction), differs between the steps of a scan, "
                "or is partly made of a parameter that stays in float"
            )
            continue
        # Fingerprint of floats are stored as they are.
        found = found if gone or is_static else None
        for index, group in enumerate(groups):
            if _alike(group, one, found):
                members = (*group.members, one.member)
                if not is_static and not group.recorded.made_like(one):
                    why = Refusal("another weight of its module looks the same")
                    refused.update(dict.fromkeys(members, why))
                groups[index] = dataclasses.replace(group, members=members)
                break
        else:
            groups.append(_Group((one.member,), one, found))
    for group in groups:
        others: list[RecordedWeight | FoundOperand] = [*floats]
        others += [other.recorded for other in groups if other is not group]
        if group.identity is None and any(
            _share_a_place(other, group.recorded) for other in others
        ):
            why = Refusal(
                "its parameter is read elsewhere, too, and its module contracts other "
                "operands of this shape"
            )
            refused.update(dict.fromkeys(group.members, why))
    return groups, refused


def _share_a_place(one: RecordedWeight | FoundOperand, other: RecordedWeight) -> bool:
    """Whether one module contracts both, in one shape and along the same axes."""
    return one.key.path == other.key.path and one.operand.is_like(other.operand)


def _alike(group: _Group, one: RecordedWeight, found: identity.Identity | None) -> bool:
    """Whether serving could not tell a weight from those of a group."""
    first = group.recorded
    if (first.key.path, first.operand, first.found.cfg) != (
        one.key.path,
        one.operand,
        one.found.cfg,
    ):
        return False
    if group.identity is None or found is None:
        return group.identity is found
    return identity.same(group.identity, found, one.operand.dtype)


def _weight(
    group: _Group,
    names: Mapping[tuple[int, int], str],
    floats: Sequence[FoundOperand],
    removed: frozenset[Parameter],
) -> Weight:
    recorded = group.recorded
    record = FrozenRecord(
        cfg=recorded.found.cfg,
        operand=recorded.operand,
        identity=group.identity,
        made_of=_made_of(recorded),
        beside_floats=any(_share_a_place(one, recorded) for one in floats),
        removed=tuple(str(one) for one in recorded.parameters if one in removed),
    )
    name = names[recorded.index]
    return Weight(recorded.key.path, name, record, recorded, group.members)


def _names(groups: list[_Group]) -> dict[tuple[int, int], str]:
    """Names every weight, by its index, after what it is made of."""
    taken = {
        path[: i + 1]
        for path in (group.recorded.key.path for group in groups)
        for i in range(len(path))
    }
    names = {}
    for group in groups:
        recorded = group.recorded
        base = recorded.found.name or "+".join(_made_of(recorded))
        name, repeat = base, 0
        while (*recorded.key.path, name) in taken:
            repeat += 1
            name = f"{base}_{repeat}"
        taken.add((*recorded.key.path, name))
        names[recorded.index] = name
    return names


def _made_of(recorded: RecordedWeight) -> tuple[str, ...]:
    """Returns the paths of its parameters, relative to its module, joined by dots.

    The last step stays, for what is named by the parameter itself.
    """
    module = recorded.key.path
    return tuple(
        ".".join(
            path[min(len(module), len(path) - 1) :]
            if path[: len(module)] == module
            else path
        )
        for path in (parameter.path for parameter in recorded.parameters)
    )

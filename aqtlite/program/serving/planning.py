"""Planning of a conversion: the weights to freeze, their names and identities."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite import config
from aqtlite.program.serving import discovery, identity, recording
from aqtlite.program.serving.call_site import IDENTITY, CallSite
from aqtlite.program.serving.contraction import OperandKey
from aqtlite.program.serving.discovery import Refusal
from aqtlite.program.serving.model import (
    Buffer,
    Discovery,
    FoundOperand,
    Model,
    Parameter,
)
from aqtlite.program.serving.placeholder import Placeholder, sliced_axes
from aqtlite.program.serving.recording import RecordedWeight

_Keys = list[frozenset[OperandKey]]
"""For each call, the operands to freeze."""

_Refusals = dict[tuple[int, OperandKey], Refusal]
"""By call and operand."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight to freeze."""

    module: tuple[str, ...]
    """The path of the module that contracts it."""

    name: str
    site: CallSite
    recorded: RecordedWeight
    """One of those that it was found by."""

    members: tuple[tuple[int, OperandKey], ...]
    """The operands that it is, by call."""

    @property
    def path(self) -> tuple[str, ...]:
        """The path of its `QTensor` in the collection "aqt"."""
        return (*self.module, self.name, self.site.operand.side)

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
    def tensor(self) -> config.Tensor:
        """The config by which it is quantized."""
        raw = self.site.cfg.fwd
        return raw.lhs if self.site.operand.side == "lhs" else raw.rhs

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs of the trace in which it is recorded that are stored."""
        side: str = self.site.operand.side
        outputs = {side: self.recorded.outputs.qtensor}
        if self.site.identity is None:
            outputs[IDENTITY] = self.recorded.outputs.values
        return outputs

    @property
    def compared(self) -> tuple[Parameter, ...]:
        """The parameters that stay beside a weight that is known by a text.

        Samples of them are stored as its `IDENTITY`, to tell whether they are those
        that it was made of.
        """
        removed = self.site.removed
        if not isinstance(self.site.identity, str) or removed is None:
            return ()
        return tuple(one for one in self.parameters if str(one) not in removed)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, planned from traces alone."""

    model: Model
    discoveries: list[Discovery]
    recorded: list[list[RecordedWeight]]
    """For each call."""

    weights: tuple[Weight, ...]
    removed: frozenset[Parameter]
    """The parameters that nothing reads but frozen weights."""

    refusals: Mapping[tuple[int, OperandKey], Refusal]
    """The reasons why operands are not frozen, by call."""

    def placeholders(self) -> dict[Parameter, Placeholder]:
        """Returns what stands for the parameters that are removed."""
        recorded = [weight.recorded for weight in self.weights]
        return _placeholders(self.removed, recorded)

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
    if not any(one.operands for one in discoveries):
        raise ValueError(_why_nothing_is_frozen(discoveries))
    recorded: list[list[RecordedWeight]] = []
    refusals: _Refusals = {}
    for call, one in enumerate(discoveries):
        keys, not_weights = discovery.weights(one.operands)
        weights = [found for found in one.operands if found.key in keys]
        recorded.append(recording.record_weights(model, call, weights) if keys else [])
        refusals.update({(call, key): why for key, why in not_weights.items()})
    refusals.update(_copies(recorded))
    return _settle(model, discoveries, recorded, refusals, {})


def _why_nothing_is_frozen(discoveries: list[Discovery]) -> str:
    count = sum(one.num_contractions for one in discoveries)
    if count:
        return (
            f"nothing to freeze: the configs of all {count} contractions that were "
            "traced quantize nothing (cfg=None or config.unquantized()). The model is "
            "a float model, whose trained variables serve as they are"
        )
    return (
        "nothing to freeze: the method that was called has no AqtDotGeneral or "
        "AqtEinsum with a config that quantizes, and no contraction that a rule "
        "quantizes (plan says why)"
    )


def _settle(
    model: Model,
    discoveries: list[Discovery],
    recorded: list[list[RecordedWeight]],
    refusals: Mapping[tuple[int, OperandKey], Refusal],
    names: Mapping[tuple[int, int], str],
) -> Plan:
    """Refuses weights until those that are left can be told from one another.

    Args:
        model: the model.
        discoveries: for each call.
        recorded: all its weights, for each call.
        refusals: of operands, so far.
        names: of weights that have one already, by index.
    """
    refusals = dict(refusals)
    while True:
        kept = [
            [one for one in of_call if (call, one.key) not in refusals]
            for call, of_call in enumerate(recorded)
        ]
        frozen: _Keys = [frozenset(one.key for one in of_call) for of_call in kept]
        removed = _removed(discoveries, kept, frozen)
        placeholders = _placeholders(removed, list(itertools.chain(*kept)))
        identities = [
            _identities(model, call, of_call, placeholders)
            for call, of_call in enumerate(kept)
        ]
        groups, refused = _grouped(discoveries, kept, frozen, removed, identities)
        if not refused:
            break
        refusals.update(refused)
    weights = _weights(groups, names or _names(groups), discoveries, frozen, removed)
    return Plan(model, discoveries, recorded, weights, removed, refusals)


def _identities(
    model: Model,
    call: int,
    recorded: Sequence[RecordedWeight],
    placeholders: Mapping[Parameter, Placeholder],
) -> list[identity.Identity | None]:
    """Returns what serving will know the recorded weights of a call by."""
    injected = {one.key for one in recorded if one.found.is_injected}
    corners = iter(
        recording.evaluated_corners(model, call, injected, placeholders)
        if injected
        else ()
    )
    return [
        next(corners) if one.found.is_injected else one.found.identity
        for one in recorded
    ]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Records of one weight of one module."""

    members: tuple[tuple[int, OperandKey], ...]
    recorded: RecordedWeight
    identity: identity.Identity | None


def _copies(recorded: list[list[RecordedWeight]]) -> _Refusals:
    """Refuses weights larger than what they are made of."""
    return {
        (call, one.key): Refusal(
            f"as {one.shape} it is larger than the parameters that it is made of: "
            "they were broadcast, perhaps to a batch"
        )
        for call, of_call in enumerate(recorded)
        for one in of_call
        if np.prod(one.shape) > sum(parameter.size for parameter in one.parameters)
    }


def _removed(
    discoveries: list[Discovery], kept: list[list[RecordedWeight]], frozen: _Keys
) -> frozenset[Parameter]:
    """Returns the parameters that no call reads if some operands are frozen.

    One whose dtype is weak stays: traced in another dtype, it would make other weights.
    """
    made_of = {
        parameter
        for of_call in kept
        for one in of_call
        for parameter in one.parameters
        if not parameter.is_weakly_typed
    }
    read = [one.read_parameters(k) for one, k in zip(discoveries, frozen, strict=True)]
    return frozenset(made_of).difference(*read)


def _placeholders(
    removed: frozenset[Parameter], recorded: list[RecordedWeight]
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
    discoveries: list[Discovery],
    kept: list[list[RecordedWeight]],
    frozen: _Keys,
    removed: frozenset[Parameter],
    identities: list[list[identity.Identity | None]],
) -> tuple[list[_Group], _Refusals]:
    """Returns the distinct weights of each module, and those that look the same."""
    groups: list[_Group] = []
    refused: _Refusals = {}
    for call, of_call in enumerate(kept):
        for one, corners in zip(of_call, identities[call], strict=True):
            member = call, one.key
            gone = removed.intersection(one.parameters)
            is_static = isinstance(corners, str)
            is_whole = len(gone) == len(one.parameters)
            is_told = is_static or (corners is not None and is_whole)
            if not is_told and (gone or not one.found.is_injected):
                refused[member] = Refusal(
                    "what it is made of could not be told at a call: it mixes elements "
                    "(by a sum or a contraction), differs between the steps of a scan, "
                    "or is partly made of a parameter that stays in float"
                )
                continue
            # Corners of floats are stored as they are.
            corners = corners if gone or is_static else None
            for index, group in enumerate(groups):
                if _alike(group, one, corners):
                    members = (*group.members, member)
                    if not is_static and not group.recorded.made_like(one):
                        why = Refusal("another weight of its module looks the same")
                        refused.update(dict.fromkeys(members, why))
                    groups[index] = dataclasses.replace(group, members=members)
                    break
            else:
                groups.append(_Group((member,), one, corners))
    for group in groups:
        if group.identity is None and (
            _is_beside_floats(group.recorded, discoveries, frozen)
            or any(
                other is not group and _share_a_place(other.recorded, group.recorded)
                for other in groups
            )
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


def _alike(
    group: _Group, one: RecordedWeight, corners: identity.Identity | None
) -> bool:
    """Whether serving could not tell a weight from those of a group."""
    first = group.recorded
    if (first.key.path, first.operand, first.found.cfg) != (
        one.key.path,
        one.operand,
        one.found.cfg,
    ):
        return False
    if group.identity is None or corners is None:
        return group.identity is corners
    return identity.same(group.identity, corners, one.operand.dtype)


def _is_beside_floats(
    recorded: RecordedWeight, discoveries: list[Discovery], frozen: _Keys
) -> bool:
    """Whether its module also contracts operands like it that stay in float."""
    return any(
        _share_a_place(one, recorded)
        for call, found in enumerate(discoveries)
        for one in found.operands
        if one.key not in frozen[call]
    )


def _weights(
    groups: list[_Group],
    names: Mapping[tuple[int, int], str],
    discoveries: list[Discovery],
    frozen: _Keys,
    removed: frozenset[Parameter],
) -> tuple[Weight, ...]:
    weights = []
    for group in groups:
        recorded = group.recorded
        site = CallSite(
            cfg=recorded.found.cfg,
            operand=recorded.operand,
            identity=group.identity,
            made_of=_made_of(recorded),
            beside_floats=_is_beside_floats(recorded, discoveries, frozen),
            removed=tuple(str(one) for one in recorded.parameters if one in removed),
        )
        name = names[recorded.index]
        weights.append(Weight(recorded.key.path, name, site, recorded, group.members))
    return tuple(weights)


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

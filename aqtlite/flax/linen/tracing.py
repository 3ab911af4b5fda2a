"""The `Model` of Linen modules: traces their calls for a conversion."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from aqtlite.flax.call import Call
from aqtlite.flax.linen import frozen_kernel, partitioning, quantized_call
from aqtlite.flax.linen.bare import identification, recorders, recording
from aqtlite.flax.linen.bare.recording import Recorder
from aqtlite.flax.linen.caller import Caller
from aqtlite.flax.linen.quantized_call import ModelByRules
from aqtlite.jaxpr import sites, tracing
from aqtlite.program import weight_parameters
from aqtlite.program.modules import flax_models
from aqtlite.program.program import Program
from aqtlite.program.serving import given, statistics_uses
from aqtlite.program.serving.contraction import Contraction, OperandKey
from aqtlite.program.serving.framework import Model
from aqtlite.program.serving.frozen_record import COLLECTION, FrozenEntry
from aqtlite.program.serving.identity import Identity
from aqtlite.program.serving.model import (
    Buffer,
    CallTrace,
    Discovery,
    FoundOperand,
    Parameter,
    Place,
    by_input,
)
from aqtlite.program.serving.placeholder import Placeholder, marker_of
from aqtlite.program.serving.weight import Refusal, Weight
from aqtlite.quantization.states import second_moment
from aqtlite.quantization.states.state_collections import STATISTICS

_FIRST_POSITION = 10**6
"""Number of the first contraction quantized by rules, above all injected ones."""

_IN_BRANCH = "contracted inside nn.cond, nn.switch, nn.while_loop or the like"


class LinenModel(Model):
    """A Linen module with its variables, or their shapes, and the calls to convert."""

    def __init__(
        self,
        model: nn.Module | ModelByRules,
        variables: Mapping[str, Any],
        calls: Sequence[Call],
    ):
        self._by_rules = model if isinstance(model, ModelByRules) else None
        self._module = model.model if isinstance(model, ModelByRules) else model
        params, quantized = given.split(variables["params"])
        self._variables = variables = {**variables, "params": params}
        self._calls = calls
        self._traces: dict[int, tracing.Traced] = {}
        self._programs: dict[int, Program | None] = {}
        self._mapped: dict[int, set[int]] = collections.defaultdict(set)
        """Axes along which Flax slices frozen parameters, by their numbers."""
        self._activations: dict[int, set[recorders.InjectedPlace]] = {}
        """For each call, the injected contractions with an activation as operand."""
        super().__init__(
            variables["params"],
            _without_params(variables),
            len(calls),
            nn.meta.is_axis_metadata,
            quantized,
        )

    def discover(self, call: int) -> Discovery:
        naming = recorders.Naming()

        def name(
            contraction: Contraction, caller: Caller, position: int
        ) -> Contraction:
            return self._in_float(naming(contraction, caller, position))

        with statistics_uses.noted_in(self.uses_of_statistics):
            traced = self._traced(call, name, self._variables)
            variables = traced.inputs[0]
            parameters = self._parameters_in(variables)
            buffers = self._buffers_in(variables)
            found = Discovery(traced.jaxpr, parameters, (), 0, frozenset(), {})
            program = self._program(traced)
            if program is not None:
                found = program.discovery(buffers)
        operands, learned = list[FoundOperand](), set[int]()
        if program is None:
            names = {i: str(one) for i, one in parameters.items()}
            named = sites.find(traced.jaxpr, names).named
        else:
            named = list(program.plan.named)
            for one in program.plan.replaced():
                states = program.states_in(one, variables)
                learned.update(jax.tree.leaves(states))
        self._traces[call], self._programs[call] = traced, program
        activations = self._activations.setdefault(call, set())
        for value in named:
            if value.name == naming.states:
                learned |= value.origin.inputs
            place = naming.places.get(value.name)
            if place is not None and not value.origin.inputs <= parameters.keys():
                activations.add(place)
            if value.name in naming.quantized:
                operand = naming.quantized[value.name]
                if operand.obstacle is None and value.is_in_branch:
                    operand = dataclasses.replace(operand, obstacle=_IN_BRANCH)
                where = Place(value.location, 0)
                operands.append(
                    operand.made_of(value.origin, where, parameters, buffers)
                )
        return dataclasses.replace(
            found,
            operands=(*operands, *found.operands),
            num_contractions=naming.num_contractions + found.num_contractions,
            learned=frozenset(parameters[i] for i in learned & parameters.keys()),
        )

    def record(self, call: int, weights: Sequence[FoundOperand]) -> CallTrace:
        injected = {one.key for one in weights if _is_injected(one.key)}
        of_rules = [one for one in weights if not _is_injected(one.key)]
        traced, program = self._traces[call], self._programs[call]
        if injected:
            recorder = recorders.storing(
                injected, recorders.weight_outputs, self._go_on(call)
            )
            with recorders.shared_weights_explained():
                traced = self._traced(call, recorder, self._variables)
            program = self._program(traced) if of_rules else None
        inputs = [traced.inputs[0]]
        stored = recording.stored_operands(traced.outputs[1])
        if program is not None:
            # The calibration states become inputs beside those of the call.
            traced = program.traced_record(self._variables, of_rules, stored)
            inputs.append(traced.inputs[1])
            stored = [*itertools.chain(*traced.outputs)]
        read: dict[int, Parameter | Buffer] = {}
        for variables in inputs:
            read.update(self._parameters_in(variables))
            read.update(self._buffers_in(variables))
        return CallTrace(traced.jaxpr, read, tuple(stored))

    def made_of_weights(
        self, weights: Mapping[OperandKey, Sequence[FoundOperand]]
    ) -> Collection[OperandKey]:
        return identification.made_of_weights(
            {key: ones for key, ones in weights.items() if _is_injected(key)}
        )

    def why_states_differ(self, weight: Weight) -> str:
        if not _is_injected(weight.key):
            return super().why_states_differ(weight)
        return (
            "the calls of its layer have calibration states of their own, by which a "
            "function in a layer cannot tell its weights apart: let all calls share "
            "them, by AqtDotGeneral(cfg, name=...), or quantize the model by rules"
        )

    def identities(
        self,
        call: int,
        weights: Sequence[Weight],
        frozen: Mapping[Parameter, Placeholder],
    ) -> list[Identity | Refusal | None]:
        injected = [one for one in weights if _is_injected(one.key)]
        if not injected:
            return super().identities(call, weights, frozen)
        of_rules = [one for one in weights if not _is_injected(one.key)]
        by_index = {
            one.index: found
            for ones, identities in (
                (of_rules, super().identities(call, of_rules, frozen)),
                (injected, self._identities_of_injected(call, injected, frozen)),
            )
            for one, found in zip(ones, identities, strict=True)
        }
        return [by_index[one.index] for one in weights]

    def _identities_of_injected(
        self,
        call: int,
        weights: Sequence[Weight],
        frozen: Mapping[Parameter, Placeholder],
    ) -> list[Identity | Refusal | None]:
        """Traces a call as it is served, and returns the weights' fingerprints."""
        program = self._programs[call]
        of_rules = set[Parameter]()
        if program is not None:
            of_rules = weight_parameters.quantized_weights(
                program.plan, program.parameters
            )
        injected = {one: x for one, x in frozen.items() if one not in of_rules}
        params = frozen_kernel.in_place_of(self._variables["params"], injected)
        keys = {one.key for one in weights}
        in_float = Contraction.in_float
        recorder = recorders.storing(
            keys, recorders.fingerprint, lambda one, place: in_float(one)
        )
        with frozen_kernel.noted_axes(self._mapped):
            variables = {**self._variables, "params": params}
            traced = self._traced(call, recorder, variables)
        stored = recording.stored_operands(traced.outputs[1])
        outputs = [one.arrays for one in stored]
        return identification.identities(weights, traced.jaxpr, outputs, frozen)

    def finds_alike(self, weight: Weight, other: Weight) -> bool:
        are_injected = _is_injected(weight.key), _is_injected(other.key)
        if all(are_injected):
            return identification.are_alike(weight, other)
        if any(are_injected):
            return False
        return super().finds_alike(weight, other)

    def serving(
        self,
        weights: Sequence[Weight],
        stored: Sequence[FrozenEntry],
        frozen: Mapping[Parameter, Placeholder],
    ) -> dict[str, Any]:
        params = self.left_in_float(self._variables["params"], frozen)
        is_boxed = any(map(nn.meta.is_axis_metadata, _nodes(params)))
        boxes = partitioning.boxes_of(params, self.parameters) if is_boxed else {}
        collection: dict[str, Any] = {}
        for weight, one in zip(weights, stored, strict=True):
            tree = collection
            for step in one.module:
                tree = tree.setdefault(step, {})
            boxed = partitioning.boxed(weight, one, boxes) if boxes else one
            tree[one.name] = boxed.stored
        marked = {
            parameter: dataclasses.replace(
                one,
                marker=marker_of(self.values[parameter], self._mapped[one.number]),
            )
            for parameter, one in frozen.items()
        }
        kept = dict(self._variables)
        if STATISTICS in kept:
            kept[STATISTICS] = second_moment.without(kept[STATISTICS])
        return {
            **kept,
            "params": frozen_kernel.in_place_of(params, marked),
            **({COLLECTION: collection} if collection else {}),
        }

    def fix_scales(self, serving: Any) -> Any:
        if STATISTICS not in serving:
            return serving
        found, is_frozen = self.uses_of_statistics, COLLECTION in serving
        fixed = statistics_uses.fix(serving[STATISTICS], found, is_frozen=is_frozen)
        others = {k: v for k, v in serving.items() if k != STATISTICS}
        return {**others, **({STATISTICS: fixed} if fixed else {})}

    def _go_on(
        self, call: int
    ) -> Callable[[Contraction, recorders.InjectedPlace], Contraction]:
        """Returns a function that keeps contractions of activations in float."""

        def go_on(
            contraction: Contraction, place: recorders.InjectedPlace
        ) -> Contraction:
            is_activation = place in self._activations[call]
            return self._in_float(contraction) if is_activation else contraction

        return go_on

    def _traced(
        self, call: int, recorder: Recorder, variables: Mapping[str, Any]
    ) -> tracing.Traced:
        """Traces a call that also returns the arrays that a recorder stores."""
        apply, arguments = self._call(call, variables)

        def recorded(*args: Any) -> Any:
            with recording.recorded_by(recorder):
                return apply(*args)

        return flax_models.trace(recorded, arguments)

    def _program(self, traced: tracing.Traced) -> Program | None:
        """Returns the program that rules make of a traced call; None without rules."""
        if self._by_rules is None:
            return None
        program = quantized_call.program_of(self._by_rules, traced, self._variables)
        return dataclasses.replace(program, first_position=_FIRST_POSITION)

    def _call(
        self, call: int, variables: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns a call as a function of arrays, and its arguments."""
        kwargs = dict(self._calls[call].kwargs)
        mutable = mutable_collections(kwargs.pop("mutable", False))

        def apply(variables: Any, args: Any, kwargs: Any) -> Any:
            out, mutated = self._module.apply(
                variables, *args, mutable=[*mutable, COLLECTION], **kwargs
            )
            mutated = dict(mutated)
            recorded = mutated.pop(COLLECTION, {})
            leaves = jax.tree.leaves((out, mutated))
            return [x for x in leaves if tracing.is_array(x)], recorded

        return apply, (variables, self._calls[call].args, kwargs)

    def _parameters_in(self, inputs: Mapping[str, Any]) -> dict[int, Parameter]:
        """Returns the inputs that are parameters, given the indices of variables."""
        return by_input(inputs["params"], self.parameters)

    def _buffers_in(self, inputs: Mapping[str, Any]) -> dict[int, Buffer]:
        """Returns the inputs that are buffers, given the indices of variables."""
        return by_input(_without_params(inputs), self.buffers)

    def _in_float(self, contraction: Contraction) -> Contraction:
        """Returns the contraction in float; unchanged if the model has rules.

        Rules would match a float contraction.
        """
        return contraction.in_float() if self._by_rules is None else contraction


def _is_injected(key: OperandKey) -> bool:
    """Whether an operand is of an injected function, and not quantized by rules."""
    return key.position < _FIRST_POSITION


def _nodes(params: Any) -> list[Any]:
    """Returns the parameters in their boxes, if they have any."""
    return jax.tree.leaves(params, is_leaf=nn.meta.is_axis_metadata)


def _without_params(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in variables.items() if k != "params"}


def mutable_collections(mutable: Any) -> list[str]:
    """Returns the names of the collections that a call changes.

    Args:
        mutable: as in `apply`.

    Raises:
        TypeError: if `mutable` is neither a bool nor names.
        ValueError: if it is True.
    """
    if isinstance(mutable, str):
        return [mutable]
    if isinstance(mutable, bool):
        if mutable:
            raise ValueError(
                "convert does not support mutable=True; name the collections that the "
                "model changes in serving, such as mutable=['cache']"
            )
        return []
    if not isinstance(mutable, list | tuple | set | frozenset):
        raise TypeError(
            "convert takes mutable= as a name or a list of names of collections, got "
            f"{mutable!r}"
        )
    return list(mutable)

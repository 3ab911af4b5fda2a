"""Traces of the calls of a Linen model that is quantized by rules."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from aqtlite.flax.call import Call
from aqtlite.flax.linen import quantized_call, recording
from aqtlite.flax.linen.parameters import buffers_of, parameters_of
from aqtlite.flax.linen.quantize_model import QuantizedModel
from aqtlite.flax.linen.tracing import mutable_collections, with_frozen_kernels
from aqtlite.jaxpr import tracing
from aqtlite.program.program import Program
from aqtlite.program.serving import uses
from aqtlite.program.serving.call_site import COLLECTION
from aqtlite.program.serving.contraction import Recorder
from aqtlite.program.serving.model import CallTrace, Model, Parameter
from aqtlite.program.serving.placeholder import Placeholder

_FIRST_POSITION = 10**6
"""Of the contractions that rules name, behind those that are injected."""


class QuantizedLinenModel(Model):
    """A quantized model with its variables, or their shapes, and its calls."""

    def __init__(
        self,
        quantized: QuantizedModel,
        variables: Mapping[str, Any],
        calls: Sequence[Call],
    ):
        self._quantized = quantized
        self._variables = variables
        self._calls = calls
        self.parameters = parameters_of(variables["params"])
        self.num_calls = len(calls)
        self.uses_of_statistics = uses.Uses()

    def trace(
        self,
        call: int,
        recorder: Recorder,
        frozen: Mapping[Parameter, Placeholder],
    ) -> CallTrace:
        kwargs = self._kwargs(call)
        by_rules = self._of_rules(call) & frozen.keys()
        injected = {one: x for one, x in frozen.items() if one not in by_rules}
        params = with_frozen_kernels(self._variables["params"], injected)
        leaves, treedef = jax.tree.flatten(params)
        numbers = [p.number for p in self.parameters if p not in injected]
        removed = {parameter.number: frozen[parameter] for parameter in by_rules}
        kept = {
            number: leaf
            for number, leaf in zip(numbers, leaves, strict=True)
            if number not in removed
        }
        buffers = {k: v for k, v in self._variables.items() if k != "params"}

        def run(kept: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
            full = [removed[n] if n in removed else kept[n] for n in numbers]
            shapes = [x.struct if isinstance(x, Placeholder) else x for x in full]
            variables = {**buffers, "params": jax.tree.unflatten(treedef, shapes)}
            values = {**buffers, "params": jax.tree.unflatten(treedef, full)}
            with recording.recorded_by(recorder):
                program, chosen = self._program(call, variables, args, kwargs)
            given = [*jax.tree.leaves((values, args, kwargs))]
            outputs, nodes = program.record([given[i] for i in chosen], recorder)
            results, recorded = jax.tree.map(
                lambda i: outputs[i], program.traced.outputs
            )
            return results, [*recording.recorded_nodes(recorded), *nodes]

        noted = uses.noted_in(self.uses_of_statistics)
        with noted:
            traced = tracing.trace(run, (kept, buffers, self._calls[call].args, kwargs))
        kept_in, buffers_in, _, _ = traced.inputs
        places = jax.tree.leaves(buffers_in, is_leaf=lambda x: x is None)
        found = zip(places, buffers_of(self._variables), strict=True)
        return CallTrace(
            traced.jaxpr,
            {i: self.parameters[number] for number, i in kept_in.items()},
            {i: buffer for i, buffer in found if i is not None},
            tuple(traced.outputs[1]),
        )

    def _kwargs(self, call: int) -> dict[str, Any]:
        kwargs = dict(self._calls[call].kwargs)
        kwargs.pop("mutable", None)
        return kwargs

    def _program(
        self, call: int, variables: Any, args: Any, kwargs: Any
    ) -> tuple[Program, tuple[int, ...]]:
        """Traces a call that stores what injected contractions record."""
        mutable = mutable_collections(self._calls[call].kwargs.get("mutable", False))

        def apply(variables: Any, args: Any, kwargs: Any) -> Any:
            out, mutated = self._quantized.model.apply(
                variables, *args, mutable=[*mutable, COLLECTION], **kwargs
            )
            mutated = dict(mutated)
            recorded = mutated.pop(COLLECTION, {})
            leaves = jax.tree.leaves((out, mutated))
            return [x for x in leaves if tracing.is_array(x)], recorded

        program, leaves = quantized_call.trace(
            self._quantized, apply, variables, args, kwargs
        )
        return dataclasses.replace(program, first_position=_FIRST_POSITION), leaves

    @functools.cache  # noqa: B019
    def _whole_program(self, call: int) -> Program:
        """A call with all parameters, of which nothing is recorded."""
        args, kwargs = self._calls[call].args, self._kwargs(call)
        with recording.recorded_by(lambda contraction, caller, position: contraction):
            return self._program(call, self._variables, args, kwargs)[0]

    def _of_rules(self, call: int) -> set[Parameter]:
        """The parameters of which contractions that rules name have weights."""
        return self._whole_program(call).parameters_of_weights()

"""Freezing the weights of quantized functions: the plan, and what it gives."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from aqtlite.jaxpr import tracing
from aqtlite.program.calibration_state import State, states_of
from aqtlite.program.program import Program
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import conversion, fixed_scales, planning, uses
from aqtlite.program.serving import report as report_lib
from aqtlite.program.serving.call_site import COLLECTION, SITE
from aqtlite.program.serving.conversion import Stored
from aqtlite.program.serving.model import (
    Buffer,
    CallTrace,
    Discovery,
    FoundOperand,
    Model,
    Parameter,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.program.serving.planning import Plan, Weight
from aqtlite.program.serving.report import ConversionReport
from aqtlite.program.serving.uses import Uses
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.stored_statistics import restored_statistics
from aqtlite.shapes.sharding import explicit_spec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["shape", "dtype", "number", "sliced", "spec"],
)
@dataclasses.dataclass(frozen=True)
class FrozenParameter(Placeholder):
    """A parameter that was frozen: a pytree without leaves."""

    @property
    def sharding(self) -> jax.sharding.PartitionSpec:
        """That of nothing. NNX takes a value that has none for an array to shard."""
        return jax.sharding.PartitionSpec()

    def __getitem__(self, index: Any) -> Any:
        """Refuses to be read, as NNX's layers read their kernels.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a parameter of shape {self.shape} is frozen, and has no values here: "
            "call the serving model, not a layer of it, and a method that was converted"
        )


def has_frozen(params: Any) -> bool:
    """Whether there are parameters that were frozen."""
    leaves = jax.tree.leaves(params, is_leaf=is_frozen)
    return any(map(is_frozen, leaves))


def is_frozen(x: Any) -> bool:
    """Whether a node is a parameter that was frozen."""
    return isinstance(x, FrozenParameter)


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a quantized function, whose first argument is its parameters."""

    function: QuantizedFunction
    args: tuple[Any, ...]
    """The other arguments, or their shapes."""

    kwargs: Mapping[str, Any]

    def program(self, params: Any, state: State) -> Program:
        """Traces the call.

        Args:
            params: the parameters, or their shapes.
            state: state of the calibrations; empty if there is none.
        """
        traced, planned = self.function.traced((params, *self.args), dict(self.kwargs))
        parameters = {
            i: parameter
            for i, parameter in enumerate(_parameters_of(params))
            if i in traced.leaves
        }
        return Program(
            traced,
            planned,
            {traced.leaves.index(i): one for i, one in parameters.items()},
            module_of=lambda one: tuple(filter(None, one.module.split("/"))),
            state=state,
            states_in=states_of,
            place_of=lambda one: (one.path,),
        )


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A planned conversion of quantized functions that share their parameters."""

    params: Any
    """The float parameters, or their shapes."""

    state: State
    model: "_Model"
    plan: Plan

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that will be frozen."""
        return self.plan.weights

    def keep_float(self, paths: Collection[tuple[str, ...]]) -> "Conversion":
        """Returns a conversion that leaves weights with these paths in float."""
        return dataclasses.replace(self, plan=self.plan.keep_float(paths))

    def freeze(self) -> list[Stored]:
        """Makes the weights, or their shapes if parameters or states are shapes."""
        values: dict[Parameter | Buffer, Any] = {}
        values.update(self.model.buffers.items())
        leaves = jax.tree.leaves(self.params)
        values.update(zip(self.model.parameters, leaves, strict=True))
        return conversion.freeze(self.plan.weights, values)

    def run(self) -> tuple[dict[str, Any], ConversionReport]:
        """Returns what `ServingFunction` takes, and what became of each parameter."""
        stored = self.freeze()
        return self.serving(stored), self.report(stored)

    def serving(self, stored: Sequence[Stored]) -> dict[str, Any]:
        """Returns what `ServingFunction` takes.

        Args:
            stored: what `freeze` returned.
        """
        collection: dict[str, Any] = {}
        for weight, one in zip(self.plan.weights, stored, strict=True):
            entries = collection.setdefault("/".join(weight.module), {})
            entries[weight.name] = {SITE: weight.site, **one.values}
        return {
            "state": self.fixed_state(),
            "params": _with_placeholders(self.params, self.plan.placeholders()),
            COLLECTION: collection,
        }

    def fixed_state(self) -> dict[str, Any]:
        """The state, with scales in place of statistics of operands."""
        if STATISTICS not in self.state:
            return dict(self.state)
        uses_of = self.model.uses_of_statistics
        fixed = fixed_scales.fix(self.state[STATISTICS], uses_of, is_frozen=True)
        return {**self.state, STATISTICS: fixed}

    def report(self, stored: Sequence[Stored]) -> ConversionReport:
        """Returns what became of each parameter.

        Args:
            stored: what `freeze` returned.
        """
        elsewhere = self.model.quantized_elsewhere()
        return report_lib.report_of(
            self.plan, stored, dict.fromkeys(elsewhere, _QUANTIZED_ELSEWHERE)
        )


_QUANTIZED_ELSEWHERE = (
    "contracted by a function that quantizes on its own and whose weights cannot be "
    "frozen here (aqtlite.make_dot_general, aqtlite.flax.AqtDotGeneral): name the "
    "contraction by a rule, or inject that of aqtlite.flax.nnx, in its place"
)


def plan(programs: Sequence[Program], params: Any, state: State) -> Conversion:
    """Plans a conversion from traces alone.

    Args:
        programs: the calls that will be served.
        params: their parameters, or their shapes.
        state: state of the calibrations; empty if there is none.
    """
    state = restored_statistics(state)
    fixed_scales.check_gathered(
        state.get(STATISTICS, {}),
        "call what is quantized with some batches first, and convert with the state "
        "that is left",
    )
    model = _Model(programs, params, state)
    return Conversion(params, state, model, planning.plan(model))


class _Model(Model):
    """Quantized functions that share their parameters, and the calls of them."""

    def __init__(self, programs: Sequence[Program], params: Any, state: State):
        self._programs, self._state = programs, state
        self.num_calls = len(programs)
        self.parameters = _parameters_of(params)
        self.uses_of_statistics = Uses()
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        self.buffers = {Buffer(i, path): leaf for i, (path, leaf) in enumerate(flat)}

    def quantized_elsewhere(self) -> set[Parameter]:
        """The parameters of weights that functions quantize on their own."""
        return {one for each in self._programs for one in each.quantized_elsewhere()}

    def discover(self, call: int) -> Discovery:
        program = dataclasses.replace(self._programs[call], state=self._state)
        with uses.noted_in(self.uses_of_statistics):
            return program.discovery()

    def record(self, call: int, weights: Sequence[FoundOperand]) -> CallTrace:
        program = self._programs[call]
        traced = program.traced_record(self._state, {one.key for one in weights})
        _, state_in = traced.inputs
        return CallTrace(
            traced.jaxpr,
            program.parameters,
            dict(zip(jax.tree.leaves(state_in), self.buffers, strict=True)),
            tuple(traced.outputs[1]),
        )


def _parameters_of(params: Any) -> tuple[Parameter, ...]:
    """The leaves of the parameters."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    for path, leaf in flat:
        if not tracing.is_array(leaf) and not isinstance(leaf, int | float | complex):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"params holds {leaf!r} at {name!r}, which is no array: close over it, "
                "as over what eqx.partition(module, eqx.is_array) gives beside arrays"
            )
    return tuple(
        Parameter(
            number=number,
            path=tuple(map(_name, path)) or ("params",),
            key_path=path,
            shape=np.shape(leaf),
            dtype=jax.dtypes.result_type(leaf),
            spec=explicit_spec(leaf),
            is_weakly_typed=_is_weakly_typed(leaf),
        )
        for number, (path, leaf) in enumerate(flat)
    )


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _with_placeholders(params: Any, frozen: Mapping[Parameter, Placeholder]) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    by_number = {
        parameter.number: FrozenParameter(
            one.shape, one.dtype, one.number, one.sliced, one.spec
        )
        for parameter, one in frozen.items()
    }
    return jax.tree.unflatten(
        treedef, [by_number.get(i, leaf) for i, leaf in enumerate(leaves)]
    )


def _is_weakly_typed(leaf: Any) -> bool:
    return not tracing.is_array(leaf) or getattr(leaf, "weak_type", False)

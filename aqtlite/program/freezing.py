"""The `Model` of quantized functions, and the parameters that freezing removes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from aqtlite.program.calibration_state import State, states_of
from aqtlite.program.program import Program
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import (
    CallTrace,
    Discovery,
    FoundOperand,
    Model,
    Parameter,
    StoredWeight,
    buffers_in,
    parameters_of,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.stored_statistics import restored_statistics


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["shape", "dtype", "number", "sliced", "spec"],
)
@dataclasses.dataclass(frozen=True)
class FrozenParameter(Placeholder):
    """A placeholder for a frozen parameter: a pytree without leaves."""

    @property
    def sharding(self) -> jax.sharding.PartitionSpec:
        """An empty spec; without one, NNX would shard the value as an array."""
        return jax.sharding.PartitionSpec()

    def __getitem__(self, index: Any) -> Any:
        """Refuses to be read, as by an NNX layer that reads its kernel.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a parameter of shape {self.shape} is frozen, and has no values here: "
            "call the serving model, not a layer of it, and a method that was converted"
        )


def has_frozen(params: Any) -> bool:
    """Whether a tree contains a `FrozenParameter`."""
    leaves = jax.tree.leaves(params, is_leaf=is_frozen)
    return any(map(is_frozen, leaves))


def is_frozen(x: Any) -> bool:
    """Whether a node is a `FrozenParameter`."""
    return isinstance(x, FrozenParameter)


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a quantized function with its parameters as the first argument."""

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
        # The parameters are the first argument, so their leaves come first.
        found = dict(enumerate(parameters_of(params)))
        return Program(
            traced,
            planned,
            {i: found[leaf] for i, leaf in enumerate(traced.leaves) if leaf in found},
            module_of=lambda one: tuple(filter(None, one.module.split("/"))),
            state=state,
            states_in=states_of,
            place_of=lambda one: (one.path,),
        )


_QUANTIZED_ELSEWHERE = (
    "contracted by a function that quantizes on its own and whose weights cannot be "
    "frozen here (aqtlite.make_dot_general, aqtlite.flax.AqtDotGeneral): name the "
    "contraction by a rule, or inject that of aqtlite.flax.nnx, in its place"
)


class FunctionModel(Model):
    """Traced calls of quantized functions with shared parameters."""

    def __init__(self, programs: Sequence[Program], params: Any, state: State):
        """Takes the traced calls that will be served.

        Args:
            programs: the calls.
            params: their parameters, or the parameters' shapes.
            state: state of the calibrations; empty if there is none.

        Raises:
            ValueError: if statistics have seen no batch.
        """
        self._programs, self._params = programs, params
        self._state = restored_statistics(state)
        statistics_uses.check_gathered(
            self._state.get(STATISTICS, {}),
            "call what is quantized with some batches first, and convert with the "
            "state that is left",
        )
        super().__init__(params, self._state, len(programs))

    def discover(self, call: int) -> Discovery:
        program = dataclasses.replace(self._programs[call], state=self._state)
        with statistics_uses.noted_in(self.uses_of_statistics):
            return program.discovery()

    def record(self, call: int, weights: Sequence[FoundOperand]) -> CallTrace:
        program = self._programs[call]
        traced = program.traced_record(self._state, {one.key for one in weights})
        _, state_in = traced.inputs
        return CallTrace(
            traced.jaxpr,
            program.parameters,
            buffers_in(state_in, self.buffers),
            tuple(traced.outputs[1]),
        )

    def serving(
        self,
        stored: Sequence[StoredWeight],
        frozen: Mapping[Parameter, Placeholder],
    ) -> Any:
        """Returns the serving parameters of a `ServingFunction`."""
        collection: dict[str, Any] = {}
        for one in stored:
            collection.setdefault("/".join(one.module), {})[one.name] = one.entry
        return {
            "state": self._state,
            "params": self.with_placeholders(frozen),
            COLLECTION: collection,
        }

    def fix_scales(self, serving: Any) -> Any:
        return {**serving, "state": self.fixed_state(serving["state"])}

    def fixed_state(self, state: State) -> dict[str, Any]:
        """Returns a state with fixed scales in place of statistics of operands."""
        if STATISTICS not in state:
            return dict(state)
        found = self.uses_of_statistics
        fixed = statistics_uses.fix(state[STATISTICS], found, is_frozen=True)
        return {**state, STATISTICS: fixed}

    def with_placeholders(self, frozen: Mapping[Parameter, Placeholder]) -> Any:
        """Returns the parameters, with a `FrozenParameter` for each frozen one."""
        leaves, treedef = jax.tree.flatten(self._params)
        for parameter, one in frozen.items():
            leaves[parameter.number] = FrozenParameter(
                one.shape, one.dtype, one.number, one.sliced, one.spec
            )
        return jax.tree.unflatten(treedef, leaves)

    def quantized_elsewhere(self) -> dict[Parameter, str]:
        found = (one for each in self._programs for one in each.quantized_elsewhere())
        return dict.fromkeys(found, _QUANTIZED_ELSEWHERE)

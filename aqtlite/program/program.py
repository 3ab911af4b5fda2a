"""A traced function with decided rules, as conversion and serving see it."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.contraction import remat
from aqtlite.jaxpr import rewriting, sites, tracing
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.jaxpr.sites import Loop
from aqtlite.operations import Side
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.serving import recording, statistics_uses
from aqtlite.program.serving.contraction import Contraction, OperandKey
from aqtlite.program.serving.model import (
    Discovery,
    FoundOperand,
    Parameter,
    Place,
    StoredOperand,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.program.serving.recording import WeightOutputs
from aqtlite.quantization.state_collections import collections_of
from aqtlite.quantization.statistics import States
from aqtlite.shapes import sharding

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, whose contractions are quantized by a plan."""

    traced: tracing.Traced
    plan: Plan
    parameters: Mapping[int, Parameter]
    """The inputs of the jaxpr that are parameters."""

    module_of: Callable[[PlannedContraction], Path]
    """The path under which the frozen weights of a contraction are kept."""

    state: Any
    """Arrays of the calibrations, or their shapes."""

    states_in: Callable[[PlannedContraction, Any], States]
    """The states of the calibrations of a contraction, taken from all of them."""

    place_of: Callable[[PlannedContraction], Path]
    """The path of their statistics in the collection of these."""

    first_position: int = 0
    """The number of the first contraction of a module."""

    def states_of(self, one: PlannedContraction) -> States:
        """The states of the calibrations of a contraction."""
        return self.states_in(one, self.state)

    def discovery(self, buffers: Collection[int] = ()) -> Discovery:
        """Returns what the operands are made of that are quantized.

        Args:
            buffers: indices of inputs that are variables, and no parameters.
        """
        found: list[FoundOperand] = []
        for one, module, position in self.numbered():
            call, obstacle = self.contraction_of_types(one), _obstacle(one)
            states = self.states_of(one)
            statistics_uses.note_operands(
                dataclasses.replace(call, states=_of_a_step(one, states)),
                self.place_of(one),
                needs_frozen=True,
            )
            for side in call.quantized_sides():
                key = OperandKey(module, position, side)
                operand = FoundOperand.of(call, key, obstacle, is_injected=False)
                place = Place(one.site.location, one.index(side))
                origin = one.site.operands[place.number]
                found.append(operand.made_of(origin, place, self.parameters, buffers))
        count = len(self.plan.quantized())
        return Discovery(
            self.traced.jaxpr, self.parameters, tuple(found), count, frozenset()
        )

    def traced_record(
        self, state: Any, keys: Collection[OperandKey], kept: Any = ()
    ) -> tracing.Traced:
        """Traces the program as a function of its inputs and states.

        Args:
            state: arrays of the calibrations, or their shapes.
            keys: keys of weights.
            kept: pytree of indices of outputs of the program.

        Returns:
            The function, which returns the outputs that are kept, and what `record`
            stores of the weights.
        """

        def run(values: list[Any], state: Any) -> Any:
            program = dataclasses.replace(self, state=state)
            outputs, stored = program.record(values, keys)
            return jax.tree.map(lambda i: outputs[i], kept), stored

        inputs = [sharding.shape_of(aval) for aval in self.traced.jaxpr.in_avals]
        return tracing.trace(run, (inputs, state))

    def record(
        self, values: Sequence[Any], keys: Collection[OperandKey]
    ) -> tuple[list[Any], list[StoredOperand]]:
        """Evaluates the program, and stores the `WeightOutputs` of weights.

        A contraction of activations, of which no weight can be made, stays in float.

        Args:
            values: the inputs of the jaxpr.
            keys: keys of the weights.
        """
        replacements, wanted = {}, {}
        for one, module, position in self.numbered():
            of_sides = [OperandKey(module, position, side) for side in ("lhs", "rhs")]
            recorded = [key for key in of_sides if key in keys]
            of_parameters = self.parameters.keys()
            gives_weight = all(x.inputs <= of_parameters for x in one.site.operands)
            if not recorded and not gives_weight:
                continue
            states = self.states_of(one)
            given: States | None = states
            record = functools.partial(self._recorded, one, recorded, gives_weight)
            has_states = bool(collections_of(one.cfg)) and any(per_step(one))
            if recorded and not has_states:
                # What a loop carries is the weight that the last step leaves.
                record, given = functools.partial(_with_states, record, states), None
            location = one.site.location
            wanted[location] = recorded
            replacements[location] = Replacement(
                record, given, has_aux=bool(recorded), per_step=per_step(one)
            )
        outputs, aux = rewriting.evaluate(self.traced.jaxpr, values, replacements)
        return outputs, [
            StoredOperand(key, aux[location][key.side])
            for location, recorded in wanted.items()
            for key in recorded
        ]

    def parameters_of_weights(self) -> set[Parameter]:
        """The parameters of which weights of quantized contractions are made."""
        return {
            self.parameters[i]
            for one in self.plan.quantized()
            for origin in one.site.operands
            if origin.identity is not None
            for i in self.parameters.keys() & origin.needed
        }

    def quantized_elsewhere(self) -> set[Parameter]:
        """The parameters of weights that functions inside quantize on their own.

        They contract by the library's functions, which rules leave as they are: what
        these quantize has a name in the trace.
        """
        return {
            self.parameters[i]
            for value in self.plan.named
            if value.name in (remat.LHS, remat.RHS)
            if (inputs := value.origin.inputs) <= self.parameters.keys()
            for i in inputs
        }

    def numbered(self) -> list[tuple[PlannedContraction, Path, int]]:
        """The quantized contractions, with the numbers that they have in a module."""
        counts: collections.Counter[Path] = collections.Counter()
        numbered = []
        for one in self.plan.quantized():
            module = self.module_of(one)
            numbered.append((one, module, self.first_position + counts[module]))
            counts[module] += 1
        return numbered

    def contraction(
        self, one: PlannedContraction, values: Sequence[Any], states: States
    ) -> Contraction:
        """A contraction as it is in serving.

        Args:
            one: the contraction.
            values: the inputs of its equation, or their types.
            states: states of the calibrations.
        """
        lhs, rhs = one.in_order(values)[:2]
        return Contraction(
            cfg=one.cfg.for_serving(),
            frozen_operands="auto",
            name=None,
            operation=one.operation(values),
            lhs=lhs,
            rhs=rhs,
            states=states,
        )

    def contraction_of_types(self, one: PlannedContraction) -> Contraction:
        """A contraction of types of arrays, without states."""
        lhs, rhs, *rest = (atom.aval for atom in one.site.eqn.invars)
        # The sizes of groups do not matter here, but are to be numbers.
        sizes = (np.zeros(aval.shape, aval.dtype) for aval in rest)
        return self.contraction(one, [lhs, rhs, *sizes], States())

    def _recorded(
        self,
        one: PlannedContraction,
        keys: Sequence[OperandKey],
        gives_weight: bool,
        values: Sequence[Any],
        states: States,
    ) -> tuple[Sequence[Any], dict[Side, WeightOutputs]]:
        call = self.contraction(one, values, states)
        recorded = {key.side: recording.outputs_of(call, key.side) for key in keys}
        if not gives_weight:
            return one.in_float(values), recorded
        return one.contract(call.cfg, one.in_order(values), states), recorded


def arrays(values: Sequence[Any]) -> list[Any]:
    """NaN in place of what is frozen, which no contraction of frozen weights reads."""
    return [_unknown(x) if isinstance(x, Placeholder) else x for x in values]


def _unknown(x: Placeholder) -> jax.Array:
    value = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jnp.full(x.shape, value, x.dtype, device=x.struct.sharding)


def _with_states(
    record: Callable[[Sequence[Any], States], Any],
    states: States,
    values: Sequence[Any],
    given: None,
) -> Any:
    del given
    return record(values, states)


def _of_a_step(one: PlannedContraction, states: States) -> States:
    """The types of the states of a contraction where it is evaluated."""
    count = sum(per_step(one))

    def of_a_step(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(x)[count:], jax.dtypes.result_type(x))

    stepped: States = jax.tree.map(of_a_step, states)
    return stepped


def per_step(one: PlannedContraction) -> tuple[bool, ...]:
    """For each scan around a contraction, whether every step has arrays of its own."""
    if collections_of(one.cfg):
        return one.site.per_step
    return weights_per_step(one)


def weights_per_step(one: PlannedContraction) -> tuple[bool, ...]:
    """The same of its frozen weights."""
    weights = [x for x in one.site.operands if x.identity is not None]
    return tuple(
        any(Loop(depth, False) in weight.needed for weight in weights)
        for depth in range(len(one.site.per_step))
    )


def _obstacle(one: PlannedContraction) -> str | None:
    """Why no weight of a contraction can be frozen, if so."""
    for name, text in (
        ("cond", "a branch of lax.cond or lax.switch"),
        ("while", "a lax.while_loop"),
        ("shard_map", "a jax.shard_map"),
    ):
        if name in one.site.around:
            return f"contracted inside {text}, which weights cannot leave"
    if per_step(one) != weights_per_step(one):
        return "in a scan, its calibration has a state for each step, and it has none"
    has_both = any(per_step(one)) and not all(per_step(one))
    if has_both and collections_of(one.cfg):
        return "only some of the scans around it have a state for each step"
    return None


def origins(one: PlannedContraction) -> dict[Side, sites.Origin]:
    """What the operands come from, in the order of the config."""
    lhs, rhs = one.in_order(one.site.operands)
    return {"lhs": lhs, "rhs": rhs}

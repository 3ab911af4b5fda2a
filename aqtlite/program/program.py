"""A traced function with its plan: evaluated, converted and served.

Before: `flax/linen/dot_general.py`, one call of a layer.
Next: `program/served.py`, the program with frozen weights.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.invariance import transform
from aqtlite.jaxpr import rewriting, tracing
from aqtlite.jaxpr.replacement import Aux, Replacement, Replacements
from aqtlite.operations import SIDES, Side
from aqtlite.program import plan_checks, weight_parameters
from aqtlite.program import steps as steps_lib
from aqtlite.program.adapters import low_rank
from aqtlite.program.gradient_rules import rule_gradients
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned, PlannedLookup
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.contraction import (
    Contraction,
    OperandKey,
    WeightOutputs,
)
from aqtlite.program.serving.model import (
    Discovery,
    FoundOperand,
    Parameter,
    Place,
    StoredOperand,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.quantization.states import second_moment, statistics
from aqtlite.quantization.states.second_moment import SecondMoment
from aqtlite.quantization.states.state_collections import STATISTICS, collections_of
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes import sharding

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function and the plan of its contractions."""

    traced: tracing.Traced
    plan: Plan
    parameters: Mapping[int, Parameter]
    """Inputs of the jaxpr that are parameters to convert, by index."""

    module_of: Callable[[Planned], Path]
    """Function from a contraction or lookup to the path that its weights are kept
    under."""

    state: Any
    """State of all calibrations, arrays or shapes."""

    states_in: Callable[[PlannedContraction, Any], States]
    """Function from a contraction and `state` to the contraction's states."""

    place_of: Callable[[PlannedContraction], Path]
    """Function from a contraction to the path of its statistics in their collection."""

    first_position: int = 0
    """Number of the first contraction of a module."""

    dropout: Any = None
    """Key of the dropout of adapters; None drops nothing."""

    def states_of(self, one: Planned) -> States:
        """Returns the states of a contraction, and the parameters of its adapter."""
        if not one.collections:
            return States()
        assert isinstance(one, PlannedContraction)  # Lookups use none.
        states = self.states_in(one, self.state)
        return low_rank.with_key(one, states, self.dropout)

    def evaluate(
        self,
        values: Sequence[Any],
        how: Callable[[Planned, States], Replacement],
    ) -> tuple[list[Any], Aux]:
        """Evaluates the program with what is quantized replaced.

        Args:
            values: inputs of the jaxpr.
            how: function from a contraction and its states, or a lookup, to its
                replacement.

        Returns:
            The outputs of the program, and the states that contractions left.

        Raises:
            ValueError: if the rules quantize nothing (`plan_checks.check_quantizes`).
        """
        plan_checks.check_quantizes(self.plan)
        replacements = {}
        for one in self.plan.every_replaced():
            made = how(one, self.states_of(one))
            replacements[one.site.location] = made
            if isinstance(one, PlannedContraction):
                replacements.update(rule_gradients.replacements(one, made))
        return self.with_replaced(values, replacements)

    def with_replaced(
        self, values: Sequence[Any], replacements: Replacements
    ) -> tuple[list[Any], Aux]:
        """Evaluates the program, in the forms of its plan, with equations replaced."""
        one = rewriting if self.plan.forms is None else transform
        return one.evaluate(self.traced.jaxpr, values, replacements)

    def discovery(self, buffers: Collection[int] = ()) -> Discovery:
        """Returns the quantized operands with their origins.

        Args:
            buffers: indices of inputs that are variables other than parameters.
        """
        found: list[FoundOperand] = []
        for one, module, position in self.numbered():
            call, obstacle = self.contraction_of_types(one), self._obstacle(one)
            sides, moments = list[Side](["rhs"]), tuple[Path, ...]()
            if isinstance(one, PlannedContraction):
                sides = call.quantized_sides()
                states = shapes_of(self.states_of(one), steps_lib.per_step(one))
                statistics_uses.note_operands(
                    dataclasses.replace(call, states=states),
                    self.place_of(one),
                    needs_frozen=True,
                )
                moments = (self.place_of(one),)
            for side in sides:
                key = OperandKey(module, position, side)
                operand = FoundOperand.of(call, key, obstacle)
                is_looked_up = isinstance(one, PlannedLookup)
                operand = dataclasses.replace(
                    operand,
                    is_matrix=operand.is_matrix and not is_looked_up,
                    state=self.state_of_weight(one, side),
                    num_states=steps_lib.num_states(one),
                    moments=moments if _is_rounded(one, side) else (),
                )
                place = Place(one.site.location, one.index(side))
                origin = one.origins[side]
                found.append(operand.made_of(origin, place, self.parameters, buffers))
        count = len(self.plan.operations())
        return Discovery(
            self.traced.jaxpr,
            self.parameters,
            tuple(found),
            count,
            frozenset(),
            weight_parameters.unsummed_weights(self.plan, self.parameters),
        )

    def traced_record(
        self, state: Any, weights: Sequence[FoundOperand], kept: Any = ()
    ) -> tracing.Traced:
        """Traces `record` as a function of the program's inputs and the state.

        Args:
            state: state of all calibrations, arrays or shapes.
            weights: the weights.
            kept: pytree of indices of the program's outputs to keep.

        Returns:
            The traced function, which returns the kept outputs and the operands that
            `record` stores.
        """

        def run(values: list[Any], state: Any) -> Any:
            program = dataclasses.replace(self, state=state)
            outputs, stored = program.record(values, weights)
            return jax.tree.map(lambda i: outputs[i], kept), stored

        inputs = [sharding.shape_of(aval) for aval in self.traced.jaxpr.in_avals]
        return tracing.trace(run, (inputs, state))

    def record(
        self, values: Sequence[Any], weights: Sequence[FoundOperand]
    ) -> tuple[list[Any], list[StoredOperand]]:
        """Evaluates the program and returns the `WeightOutputs` of weights.

        A contraction stays in float if an operand is an activation: no weight can
        depend on its result.

        Args:
            values: inputs of the jaxpr.
            weights: the weights.

        Returns:
            The outputs of the program, and the stored operands.
        """
        by_key = {one.key: one for one in weights}
        replacements, wanted = {}, {}
        for one, module, position in self.numbered():
            of_sides = [OperandKey(module, position, side) for side in SIDES]
            recorded = [by_key[key] for key in of_sides if key in by_key]
            gives_weight = self._gives_weight(one)
            if not recorded and not gives_weight:
                continue
            # No weight is made of the result of an adapter.
            states = self.states_of(one)._replace(adapter=())
            steps = steps_lib.per_step(one)
            given: States | None = states
            record = functools.partial(self._recorded, one, recorded, gives_weight)
            if recorded:
                steps = steps_lib.frozen_per_step(one) or ()
                states = self._by_all_moments(states, recorded, sum(steps))
                given = states
            if recorded and not (bool(collections_of(one.cfg)) and any(steps)):
                # Loops carry the weight as auxiliary arrays, in place of given states.
                record, given = functools.partial(_with_states, record, states), None
            location = one.site.location
            wanted[location] = recorded
            replacements[location] = Replacement(
                record, given, has_aux=bool(recorded), per_step=steps
            )
        outputs, aux = self.with_replaced(values, replacements)
        return outputs, [
            StoredOperand(weight.key, aux[location][weight.key.side])
            for location, recorded in wanted.items()
            for weight in recorded
        ]

    def state_of_weight(self, one: Planned, side: Side) -> Path:
        """Returns the path of the states that quantize an operand; empty for none."""
        if isinstance(one, PlannedLookup):
            return ()
        reads = statistics.reads_state(one.cfg.for_serving(), side)
        return self.place_of(one) if reads else ()

    def _by_all_moments(
        self, states: States, recorded: Sequence[FoundOperand], num_steps: int
    ) -> States:
        """Returns the states of a contraction, with the moment of all its inputs.

        The moments of all contractions of its weight are added; and, of a weight that
        the steps of scans share, those of the steps.

        Args:
            states: states of the contraction.
            recorded: its weights.
            num_steps: number of scans around it with a weight for each step.
        """
        places = [place for weight in recorded for place in weight.moments]
        gathered = self.state.get(STATISTICS, {}) if places else {}
        found = [statistics_uses.at(gathered, (*one, "moment")) for one in places]
        if not found or not all(isinstance(one, SecondMoment) for one in found):
            return states
        summed = (second_moment.of_steps(one, num_steps) for one in found)
        return states._replace(moment=functools.reduce(second_moment.merged, summed))

    def numbered(self) -> list[tuple[Planned, Path, int]]:
        """Returns what is quantized with its modules and numbers in these."""
        counts: collections.Counter[Path] = collections.Counter()
        numbered = []
        for one in self.plan.operations():
            module = self.module_of(one)
            numbered.append((one, module, self.first_position + counts[module]))
            counts[module] += 1
        return numbered

    def contraction(
        self, one: Planned, values: Sequence[Any], states: States
    ) -> Contraction:
        """Returns a contraction with its serving config; of a lookup, its stand-in.

        Args:
            one: the contraction, or the lookup.
            values: inputs of its equation, or their types.
            states: states of the calibrations.
        """
        if isinstance(one, PlannedLookup):
            cfg, rhs = one.for_freezing(), one.seen(values[0])
            operation, lhs = one.stand_in(rhs)
        else:
            cfg, operation = one.cfg.for_serving(), one.operation(values)
            lhs, rhs = one.in_order(values)[:2]
        return Contraction(
            cfg=cfg,
            frozen_operands="auto",
            name=None,
            operation=operation,
            lhs=lhs,
            rhs=rhs,
            states=states,
        )

    def contraction_of_types(self, one: Planned) -> Contraction:
        """Returns a contraction of abstract values, without states."""
        lhs, rhs, *rest = (atom.aval for atom in one.site.eqn.invars)
        # Group sizes must be concrete; their values do not matter here.
        sizes = (np.zeros(aval.shape, aval.dtype) for aval in rest)
        return self.contraction(one, [lhs, rhs, *sizes], States())

    def _recorded(
        self,
        one: Planned,
        weights: Sequence[FoundOperand],
        gives_weight: bool,
        values: Sequence[Any],
        states: States,
    ) -> tuple[Sequence[Any], dict[Side, WeightOutputs]]:
        call = self.contraction(one, values, states)
        sides = [weight.key.side for weight in weights]
        recorded = {side: call.weight_outputs(side) for side in sides}
        if not gives_weight:
            return one.in_float(values), recorded
        return one.contract(
            one.cfg.for_serving(), one.in_order(values), states
        ), recorded

    def _gives_weight(self, one: Planned) -> bool:
        """Whether a weight may be made of the result of a contraction."""
        of_parameters = self.parameters.keys()
        return all(x.inputs <= of_parameters for x in one.site.operands)

    def _obstacle(self, one: Planned) -> str | None:
        """Returns why no weight of a contraction can be frozen, or None."""
        for name, text in (
            ("cond", "a branch of lax.cond or lax.switch"),
            ("while", "a lax.while_loop"),
            ("shard_map", "a jax.shard_map"),
        ):
            if name in one.site.around:
                return f"contracted inside {text}, which weights cannot leave"
        steps = steps_lib.frozen_per_step(one)
        if steps is None:
            return (
                "only some of the scans around it have a weight, or a calibration "
                "state, for each step"
            )
        if steps != steps_lib.per_step(one) and self._gives_weight(one):
            return (
                "in a scan, its calibration has a state for each step, and it has none"
            )
        return None


def arrays(values: Sequence[Any]) -> list[Any]:
    """Returns inputs with NaN for placeholders, which no evaluated equation reads."""
    return [_unknown(x) if isinstance(x, Placeholder) else x for x in values]


def _unknown(x: Placeholder) -> jax.Array:
    value = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    # These NaN are meant: jax_debug_nans would stop where they are made.
    with jax.debug_nans(False):
        return jnp.full(x.shape, value, x.dtype, device=x.struct.sharding)


def _with_states(
    record: Callable[[Sequence[Any], States], Any],
    states: States,
    values: Sequence[Any],
    given: None,
) -> Any:
    del given
    return record(values, states)


def shapes_of(tree: Any, per_step: Sequence[bool] = ()) -> Any:
    """Returns the shapes and dtypes of the arrays and numbers in a tree.

    Args:
        tree: pytree, such as the states of a contraction.
        per_step: whether each scan around them has its own along a leading axis, which
            the shapes of one step do not have.
    """
    count = sum(per_step)

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(x)[count:], jax.dtypes.result_type(x))

    return jax.tree.map(shape_of, tree)


def _is_rounded(one: Planned, side: Side) -> bool:
    """Whether an operand, if it is a weight, is rounded by the moment of its inputs."""
    return side == "rhs" and one.cfg.fwd.rhs.rounding is not None

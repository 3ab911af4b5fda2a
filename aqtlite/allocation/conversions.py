"""Conversions with one candidate for all contractions of a call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from aqtlite.allocation import gathering
from aqtlite.allocation.gathering import Gathered
from aqtlite.allocation.switched import Switched
from aqtlite.allocation.switches import Given
from aqtlite.jaxpr.replacement import Location
from aqtlite.operations import Side
from aqtlite.program.convert import FunctionModel
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned, PlannedLookup
from aqtlite.program.program import Path, Program, shapes_of
from aqtlite.program.serving import conversion, planning
from aqtlite.program.serving.model import Parameter, parameters_of
from aqtlite.qtensor import codes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states import second_moment
from aqtlite.quantization.states.state_collections import STATISTICS
from aqtlite.quantization.states.statistics import States


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion of a call with one candidate, planned and not run."""

    program: Program
    model: FunctionModel
    """The call with shapes in place of arrays."""

    plan: planning.Plan
    operations: Mapping[tuple[Path, int], Planned]
    """Contractions and lookups, by the module and number of their weights' keys."""

    @property
    def removed(self) -> frozenset[Parameter]:
        """The parameters that are frozen, and read by nothing else."""
        return self.plan.removed

    def bytes_of(self) -> dict[Location, int]:
        """Returns what is kept for each operation beside parameters, in bytes.

        By location. Frozen weights, each with one operation that reads it, and scales
        of activations.
        """
        found = {one.site.location: 0 for one in self.operations.values()}
        by_path = {one.path: one.site.location for one in self.program.plan.quantized()}
        stored = conversion.freeze(self.plan)
        for weight, one in zip(self.plan.weights, stored, strict=True):
            _, key = weight.members[0]
            operation = self.operations[key.path, key.position]
            found[operation.site.location] += codes.stored_bytes(one.values)
        for entries in self.model.fixed_state(self.program.state).values():
            for path, entry in second_moment.without(entries).items():
                found[by_path[path]] += codes.stored_bytes(entry)
        return found

    def rounded(self, params: Any) -> dict[Location, dict[Side, QTensor]]:
        """Returns the weights that a conversion rounds, by location and side.

        Args:
            params: the parameters.
        """
        model = FunctionModel([self.program], params, self.program.state)
        weights = tuple(
            one for one in self.plan.weights if one.made.damping is not None
        )
        plan = dataclasses.replace(self.plan, model=model, weights=weights)
        found: dict[Location, dict[Side, QTensor]] = {}
        for weight, one in zip(weights, conversion.freeze(plan), strict=True):
            side = weight.record.operand.side
            for _, key in weight.members:
                at = self.operations[key.path, key.position].site.location
                found.setdefault(at, {})[side] = one.values[side]
        return found


def conversion_of(
    switched: Switched, candidate: int, gathered: Gathered
) -> Conversion | None:
    """Plans the conversion with one candidate; None if it quantizes nothing.

    Args:
        switched: the traced call.
        candidate: index of the candidate.
        gathered: the statistics, or their shapes.
    """
    forms = [one.forms[candidate] for one in switched.switches]
    contractions = tuple(one for one in forms if isinstance(one, PlannedContraction))
    lookups = tuple(one for one in forms if isinstance(one, PlannedLookup))
    if not any(one.is_quantized for one in forms):
        return None
    name = list(switched.plans)[candidate]
    params = shapes_of(switched.call.args[0])
    program = Program(
        switched.traced,
        dataclasses.replace(
            switched.plans[name], contractions=contractions, lookups=lookups
        ),
        parameters_read(switched),
        module_of=lambda one: tuple(filter(None, one.kept_under.split("/"))),
        state=gathering.collection_of(switched.switches, candidate, gathered),
        states_in=_states_in,
        place_of=lambda one: (one.path,),
    )
    operations = {(module, i): one for one, module, i in program.numbered()}
    model = FunctionModel([program], params, shapes_of(program.state))
    return Conversion(program, model, planning.plan(model), operations)


def _states_in(one: PlannedContraction, state: Any) -> States:
    """Returns the statistics of a contraction; those of gradients do not serve."""
    return States(**state.get(STATISTICS, {}).get(one.path, {}))


def given_of(switched: Switched, gathered: Gathered) -> list[tuple[Given, ...]]:
    """Returns the arrays of all candidates, by contraction.

    Weights that a candidate rounds at conversion are rounded.

    Args:
        switched: the traced call.
        gathered: the statistics.
    """
    rounded = []
    for candidate in range(len(switched.plans)):
        one = conversion_of(switched, candidate, gathered)
        rounded.append({} if one is None else one.rounded(switched.call.args[0]))
    return [
        tuple(
            Given(
                gathering.states_of(switch, candidate, gathered)._replace(moment=()),
                frozen.get(switch.forms[0].site.location, {}),
            )
            for candidate, frozen in enumerate(rounded)
        )
        for switch in switched.switches
    ]


def parameters_read(switched: Switched) -> dict[int, Parameter]:
    """Returns the parameters among the inputs of the jaxpr, by index."""
    by_leaf = dict(enumerate(parameters_of(shapes_of(switched.call.args[0]))))
    leaves = enumerate(switched.traced.leaves)
    return {i: by_leaf[leaf] for i, leaf in leaves if leaf in by_leaf}

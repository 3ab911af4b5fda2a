"""Conversions with one candidate for all contractions of a call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from aqtlite.allocation import gathering
from aqtlite.allocation.gathering import Gathered
from aqtlite.allocation.switched import Switched
from aqtlite.allocation.switches import Given
from aqtlite.operations import Side
from aqtlite.program.convert import FunctionModel
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Path, Program, shapes_of
from aqtlite.program.serving import conversion, planning
from aqtlite.program.serving.model import Parameter, parameters_of
from aqtlite.qtensor import codes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import second_moment
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.statistics import States


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion of a call with one candidate, planned and not run."""

    program: Program
    model: FunctionModel
    """The call with shapes in place of arrays."""

    plan: planning.Plan
    paths: Mapping[tuple[Path, int], str]
    """Path of each contraction, by the module and number of its weights' keys."""

    @property
    def removed(self) -> frozenset[Parameter]:
        """The parameters that are frozen, and read by nothing else."""
        return self.plan.removed

    def bytes_of(self) -> dict[str, int]:
        """Returns what is kept for each contraction beside parameters, in bytes.

        Frozen weights, each with one contraction that reads it, and scales of
        activations.
        """
        found = dict.fromkeys(self.paths.values(), 0)
        stored = conversion.freeze(self.plan)
        for weight, one in zip(self.plan.weights, stored, strict=True):
            _, key = weight.members[0]
            path = self.paths[key.path, key.position]
            found[path] += codes.stored_bytes(one.values)
        for entries in self.model.fixed_state(self.program.state).values():
            for path, entry in second_moment.without(entries).items():
                found[path] += codes.stored_bytes(entry)
        return found

    def rounded(self, params: Any) -> dict[str, dict[Side, QTensor]]:
        """Returns the weights that a conversion rounds, by contraction and side.

        Args:
            params: the parameters.
        """
        model = FunctionModel([self.program], params, self.program.state)
        weights = tuple(
            one for one in self.plan.weights if one.made.damping is not None
        )
        plan = dataclasses.replace(self.plan, model=model, weights=weights)
        found: dict[str, dict[Side, QTensor]] = {}
        for weight, one in zip(weights, conversion.freeze(plan), strict=True):
            side = weight.record.operand.side
            for _, key in weight.members:
                path = self.paths[key.path, key.position]
                found.setdefault(path, {})[side] = one.values[side]
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
    forms = tuple(one.forms[candidate] for one in switched.switches)
    if not any(one.is_quantized for one in forms):
        return None
    name = list(switched.plans)[candidate]
    params = shapes_of(switched.call.args[0])
    program = Program(
        switched.traced,
        dataclasses.replace(switched.plans[name], contractions=forms),
        parameters_read(switched),
        module_of=lambda one: tuple(filter(None, one.kept_under.split("/"))),
        state=gathering.collection_of(switched.switches, candidate, gathered),
        states_in=_states_in,
        place_of=lambda one: (one.path,),
    )
    paths = {(module, i): one.path for one, module, i in program.numbered()}
    model = FunctionModel([program], params, shapes_of(program.state))
    return Conversion(program, model, planning.plan(model), paths)


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
                frozen.get(switch.path, {}),
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

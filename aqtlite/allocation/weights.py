"""The weights of switched contractions, and their sizes with each candidate."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from aqtlite.allocation.switches import Switched
from aqtlite.program.convert import FunctionModel
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Program
from aqtlite.program.serving import conversion, planning
from aqtlite.program.serving.model import Parameter, parameters_of
from aqtlite.qtensor import codes
from aqtlite.quantization.statistics import States


@dataclasses.dataclass(frozen=True)
class Weight:
    """Contractions that read the same parameters, and get one choice."""

    places: tuple[int, ...]
    """Indices of their switches."""

    float_bytes: int
    """Bytes of the parameters."""

    sizes: tuple[int | None, ...]
    """Bytes of what a conversion with each candidate keeps of the parameters; None if
    it quantizes none of the contractions."""

    def nbytes(self, candidate: int | None) -> int:
        """Returns the bytes with a candidate; in float, with None or if it has none."""
        size = None if candidate is None else self.sizes[candidate]
        return self.float_bytes if size is None else size


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a call."""

    weights: tuple[Weight, ...]
    other_bytes: int
    """Bytes of all other variables."""

    def total(self, chosen: Sequence[int | None]) -> int:
        """Returns the bytes of all variables.

        Args:
            chosen: for each weight, the index of a candidate, or None for float.
        """
        pairs = zip(self.weights, chosen, strict=True)
        return self.other_bytes + sum(one.nbytes(i) for one, i in pairs)


def weights_of(switched: Switched) -> Weights:
    """Returns the weights of switched contractions, with sizes as in checkpoints.

    Conversions are planned, and nothing is run.

    Args:
        switched: the traced call.
    """
    params = jax.tree.map(_shape_of, switched.call.args[0])
    leaves = parameters_of(params)
    by_leaf = dict(enumerate(leaves))
    parameters = {
        i: by_leaf[leaf]
        for i, leaf in enumerate(switched.traced.leaves)
        if leaf in by_leaf
    }
    groups = _groups(switched, parameters)
    frozen = [
        _frozen(switched, plan, params, parameters) for plan in switched.plans.values()
    ]
    weights = []
    for places, read in groups:
        sizes: list[int | None] = []
        for candidate, (bytes_of, removed) in enumerate(frozen):
            forms = [switched.switches[place].forms[candidate] for place in places]
            if not any(one.is_quantized for one in forms):
                sizes.append(None)
                continue
            paths = {one.path for one in forms}
            kept = sum(one.nbytes for one in read - removed)
            sizes.append(kept + sum(n for path, n in bytes_of if path in paths))
        float_bytes = sum(one.nbytes for one in read)
        weights.append(Weight(tuple(places), float_bytes, tuple(sizes)))
    grouped = frozenset().union(*(read for _, read in groups))
    others = sum(one.nbytes for one in leaves if one not in grouped)
    others += codes.stored_bytes(switched.call.others)
    return Weights(tuple(weights), others)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x))


def _groups(
    switched: Switched, parameters: dict[int, Parameter]
) -> list[tuple[list[int], frozenset[Parameter]]]:
    """Returns the switches that share parameters, with these, in program order."""
    groups: list[tuple[list[int], frozenset[Parameter]]] = []
    for place, switch in enumerate(switched.switches):
        read = frozenset(
            parameters[i]
            for operand in _weights_in(switch.forms[0])
            for i in operand & parameters.keys()
        )
        if not read:
            continue
        sharing = [one for one in groups if one[1] & read]
        places = sorted([place, *(i for one in sharing for i in one[0])])
        read = read.union(*(one[1] for one in sharing))
        groups = [one for one in groups if one not in sharing]
        groups.append((places, read))
    return sorted(groups, key=lambda one: one[0])


def _weights_in(one: PlannedContraction) -> list[frozenset[int]]:
    operands = zip((one.lhs, one.rhs), one.site.operands, strict=True)
    return [origin.inputs for operand, origin in operands if operand.kind == "weight"]


def _frozen(
    switched: Switched,
    plan: Plan,
    params: Any,
    parameters: dict[int, Parameter],
) -> tuple[list[tuple[str, int]], frozenset[Parameter]]:
    """Plans the conversion with one candidate for all contractions.

    Returns:
        For each frozen weight, the path of a contraction that reads it, and its bytes;
        and the parameters that are removed.
    """
    program = Program(
        switched.traced,
        plan,
        parameters,
        module_of=lambda one: tuple(filter(None, one.module.split("/"))),
        state={},
        states_in=lambda one, state: States(),
        place_of=lambda one: (one.path,),
    )
    paths = {(module, i): one.path for one, module, i in program.numbered()}
    planned = planning.plan(FunctionModel([program], params, {}))
    found = []
    for weight, stored in zip(planned.weights, conversion.freeze(planned), strict=True):
        _, key = weight.members[0]
        path = paths[key.path, key.position]
        found.append((path, codes.stored_bytes(stored.values)))
    return found, planned.removed

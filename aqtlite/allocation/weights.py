"""The weights of switched contractions, and their sizes with each candidate."""

import dataclasses
from collections.abc import Sequence

import jax

from aqtlite.allocation import conversions, gathering
from aqtlite.allocation.switched import Switched
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.program import shapes_of
from aqtlite.program.serving.model import Parameter, parameters_of
from aqtlite.qtensor import codes
from aqtlite.quantization.states.state_collections import OF_GRADIENTS, STATISTICS


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
    other: int
    """Bytes of all other variables but statistics."""

    def amount(self, weight: int, candidate: int | None) -> int:
        """Returns the bytes of a weight with a candidate; in float, with None."""
        return self.weights[weight].nbytes(candidate)

    def total(self, chosen: Sequence[int | None]) -> int:
        """Returns the bytes of all variables but statistics.

        Args:
            chosen: for each weight, the index of a candidate, or None for float.
        """
        amounts = (self.amount(i, candidate) for i, candidate in enumerate(chosen))
        return self.other + sum(amounts)


def weights_of(switched: Switched) -> Weights:
    """Returns the weights of switched contractions, with sizes as in checkpoints.

    Conversions are planned, and nothing is run.

    Args:
        switched: the traced call.
    """
    parameters = conversions.parameters_read(switched)
    gathered = jax.eval_shape(lambda: gathering.first(switched.switches))
    groups = _groups(switched, parameters)
    planned = []
    for candidate in range(len(switched.plans)):
        one = conversions.conversion_of(switched, candidate, gathered)
        planned.append(None if one is None else (one.bytes_of(), one.removed))
    weights = []
    for places, read in groups:
        sizes: list[int | None] = []
        for candidate, found in enumerate(planned):
            forms = [switched.switches[place].forms[candidate] for place in places]
            if found is None or not any(one.is_quantized for one in forms):
                sizes.append(None)
                continue
            bytes_of, removed = found
            kept = sum(one.nbytes for one in read - removed)
            quantized = {one.site.location for one in forms if one.is_quantized}
            sizes.append(kept + sum(bytes_of[one] for one in quantized))
        float_bytes = sum(one.nbytes for one in read)
        weights.append(Weight(tuple(places), float_bytes, tuple(sizes)))
    grouped = frozenset().union(*(read for _, read in groups))
    leaves = parameters_of(shapes_of(switched.call.args[0]))
    others = sum(one.nbytes for one in leaves if one not in grouped and _serves(one))
    others += codes.stored_bytes(switched.call.others)
    return Weights(tuple(weights), others)


def _serves(one: Parameter) -> bool:
    """Whether a leaf is no statistic, which candidates gather anew if they need any."""
    return one.path[:1] not in ((STATISTICS,), (OF_GRADIENTS,))


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


def _weights_in(one: Planned) -> list[frozenset[int]]:
    operands = zip((one.lhs, one.rhs), one.site.operands[:2], strict=True)
    return [origin.inputs for operand, origin in operands if operand.kind == "weight"]

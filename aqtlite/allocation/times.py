"""Measured times of the contractions of each weight, with each candidate."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from aqtlite import config
from aqtlite.allocation.switched import Switched
from aqtlite.allocation.switches import Switch
from aqtlite.allocation.weights import Weights
from aqtlite.program.measuring import measure
from aqtlite.program.measuring.measurement import MeasuredContraction
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import PlannedLookup

SECOND = 10**9
"""Nanoseconds in a second: times are integers, as the solver takes them."""

_SECONDS = 0.2
"""Time for the calls of one contraction with one candidate."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Times in nanoseconds, summed over the contractions that read a weight."""

    in_float: tuple[int, ...]
    """Time of each weight in float."""

    quantized: tuple[tuple[int, ...], ...]
    """Time of each weight with each candidate."""

    other: int = 0
    """Time beside that of the weights: none of it is measured."""

    def amount(self, weight: int, candidate: int | None) -> int:
        """Returns the time of a weight with a candidate; in float, with None."""
        if candidate is None:
            return self.in_float[weight]
        return self.quantized[weight][candidate]

    def total(self, chosen: Sequence[int | None]) -> int:
        """Returns the time of all weights.

        Args:
            chosen: for each weight, the index of a candidate, or None for float.
        """
        return sum(self.amount(i, candidate) for i, candidate in enumerate(chosen))


def times_of(switched: Switched, weights: Weights) -> Times:
    """Measures the contractions of weights, as `measure_serving` does.

    Each distinct one is timed alone, in float and as served with each candidate, whose
    calls alternate. The time in float is the median over the candidates.

    Args:
        switched: the traced call.
        weights: its weights.
    """
    places = [place for one in weights.weights for place in one.places]
    switches = {place: switched.switches[place] for place in places}
    forms = tuple(
        form
        for one in switches.values()
        for form in one.forms
        if isinstance(form, PlannedContraction)
    )
    plan = next(iter(switched.plans.values()))
    found = measure.measure_serving(
        dataclasses.replace(plan, contractions=forms), seconds=_SECONDS
    )
    measured = {
        (form.path, form.cfg): one for one in found.contractions for form in one.alike
    }
    times = {place: _times(one, measured) for place, one in switches.items()}
    by_weight = [
        [sum(both) for both in zip(*(times[p] for p in one.places), strict=True)]
        for one in weights.weights
    ]
    return Times(
        tuple(in_float for in_float, *_ in by_weight),
        tuple(tuple(quantized) for _, *quantized in by_weight),
    )


def _times(
    switch: Switch,
    measured: dict[tuple[str, config.DotGeneral], MeasuredContraction],
) -> list[int]:
    """Returns the time of a contraction in float, and with each candidate.

    Lookups are not timed.
    """
    if isinstance(switch.forms[0], PlannedLookup):
        # Against a contraction, the time of the rows of a few tokens is nothing.
        return [0] * (1 + len(switch.forms))
    steps = math.prod(switch.forms[0].site.lengths)
    of_forms = [
        measured[one.path, one.cfg] if one.is_quantized else None
        for one in switch.forms
    ]
    in_float = statistics.median(
        one.float_seconds for one in of_forms if one is not None
    )
    # Relative to float calls between its own: the machine's speed changes meanwhile.
    seconds = [in_float if one is None else in_float / one.gain for one in of_forms]
    return [round(steps * SECOND * one) for one in (in_float, *seconds)]

"""Statistics of all candidates, gathered in one pass of the float model.

Candidates that differ in the grid of their weights alone share them: the second moment
of the inputs of a contraction is there once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite import config
from aqtlite.allocation.switches import Switch
from aqtlite.jaxpr import tracing
from aqtlite.jaxpr.replacement import Evaluate, Replacement
from aqtlite.program import calibration_state
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.serving import statistics_uses
from aqtlite.quantization.states.state_collections import STATISTICS, collections_of
from aqtlite.quantization.states.statistics import States

Gathered = Mapping[str, tuple[States, ...]]
"""Statistics by the path of the contraction, in the order of `_gatherers`."""


def gathers(cfg: config.DotGeneral) -> bool:
    """Whether calls or conversions of a config read statistics of operands."""
    return STATISTICS in collections_of(cfg)


def first(switches: Sequence[Switch]) -> Gathered:
    """Returns the statistics of no batch, of the contractions that have any."""
    return {
        one.path: tuple(map(calibration_state.states_of_zeros, forms))
        for one in switches
        if (forms := _gatherers(one))
    }


def after(
    switches: Sequence[Switch],
    traced: tracing.Traced,
    evaluate: Evaluate,
    values: Sequence[Any],
    gathered: Gathered,
) -> Gathered:
    """Returns the statistics after a batch, with all contractions in float.

    Args:
        switches: the contractions.
        traced: the traced call.
        evaluate: function that evaluates its program.
        values: inputs of its jaxpr.
        gathered: the statistics of the batches before.
    """
    gathering = {one.path: one for one in switches if _gatherers(one)}
    replacements = {
        one.forms[0].site.location: _replacement(one, gathered[path])
        for path, one in gathering.items()
    }
    _, aux = evaluate(traced.jaxpr, values, replacements)
    return {path: aux[one.forms[0].site.location] for path, one in gathering.items()}


def states_of(switch: Switch, candidate: int, gathered: Gathered) -> States:
    """Returns the statistics of a contraction that a candidate reads.

    Args:
        switch: the contraction.
        candidate: index of the candidate.
        gathered: the statistics.
    """
    one = switch.forms[candidate]
    if not one.is_quantized or not gathers(one.cfg):
        return States()
    cfgs = [form.cfg for form in _gatherers(switch)]
    states = gathered[one.path][cfgs.index(_gatherer(one.cfg))]
    fields = collections_of(one.cfg)[STATISTICS]
    return States(**{field: getattr(states, field) for field in fields})


def collection_of(
    switches: Sequence[Switch], candidate: int, gathered: Gathered
) -> dict[str, Any]:
    """Returns the statistics of a candidate, as the state of a function keeps them.

    Args:
        switches: the contractions.
        candidate: index of the candidate.
        gathered: the statistics.
    """
    found = {}
    for switch in switches:
        one = switch.forms[candidate]
        if one.is_quantized and gathers(one.cfg):
            states = states_of(switch, candidate, gathered)
            fields = collections_of(one.cfg)[STATISTICS]
            found[one.path] = {field: getattr(states, field) for field in fields}
    return {STATISTICS: found} if found else {}


def check(gathered: Gathered) -> None:
    """Raises ValueError if a contraction has seen no batch."""
    statistics_uses.check_gathered(
        {path: [one._asdict() for one in states] for path, states in gathered.items()},
        "give batches with which the model runs this contraction, on inputs without "
        "NaN or infinities",
    )


def _gatherers(switch: Switch) -> list[PlannedContraction]:
    """Returns a contraction with each of the configs that gather its statistics."""
    first = switch.forms[0]
    if not isinstance(first, PlannedContraction):
        return []
    cfgs = [
        _gatherer(one.cfg)
        for one in switch.forms
        if one.is_quantized and gathers(one.cfg)
    ]
    return [dataclasses.replace(first, cfg=cfg) for cfg in dict.fromkeys(cfgs)]


_WEIGHTS = config.weight_only(bits=8).fwd.rhs


def _gatherer(cfg: config.DotGeneral) -> config.DotGeneral:
    """Returns a config that gathers the same statistics, alike for many candidates."""
    fwd = cfg.fwd
    if fwd.smoothing is None and not fwd.rhs.gathers_statistics:
        rounding = None if fwd.rhs.rounding is None else config.Gptq()
        rhs = dataclasses.replace(_WEIGHTS, rounding=rounding)
        fwd = dataclasses.replace(fwd, rhs=rhs)
    return dataclasses.replace(config.unquantized(), fwd=fwd)


def _replacement(switch: Switch, gathered: tuple[States, ...]) -> Replacement:
    forms = _gatherers(switch)

    def function(values: Sequence[Any], given: Any) -> tuple[Sequence[Any], Any]:
        states = tuple(
            calibration_state.states_after(one, values, of_form)
            for one, of_form in zip(forms, given, strict=True)
        )
        return forms[0].in_float(values), states

    per_step = forms[0].site.per_step
    return Replacement(function, gathered, has_aux=True, per_step=per_step)

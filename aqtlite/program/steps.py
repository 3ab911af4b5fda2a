"""Scans around a contraction, whose steps may have states and weights of their own."""

import math
import operator

from aqtlite.jaxpr.origins import Loop
from aqtlite.program.planned_lookup import Planned
from aqtlite.quantization.states import statistics
from aqtlite.quantization.states.state_collections import collections_of


def per_step(one: Planned) -> tuple[bool, ...]:
    """Whether each scan around a contraction has its states or weights per step."""
    if one.collections:
        return one.site.per_step
    return weights_per_step(one)


def weights_per_step(one: Planned) -> tuple[bool, ...]:
    """Whether each scan around a contraction has its frozen weights per step."""
    weights = [x for x in one.site.operands if x.identity is not None]
    return tuple(
        any(Loop(depth, False) in weight.needed for weight in weights)
        for depth in range(len(one.site.per_step))
    )


def frozen_per_step(one: Planned) -> tuple[bool, ...] | None:
    """Whether each scan around a contraction has a frozen weight for each step.

    The steps of a scan that share a parameter have a weight each if they have a state
    each that quantizes it.

    Returns:
        A bool for each scan around it; None if its weights cannot be frozen, since
        loops pass weights and states on in another way.
    """
    frozen, states = weights_per_step(one), one.site.per_step
    if not collections_of(one.cfg):
        is_passed = one.adapter is None or not any(frozen) or frozen == states
        return frozen if is_passed else None
    cfg = one.cfg.for_serving()
    weights = [s for s, x in one.origins.items() if x.identity is not None]
    if any(statistics.reads_state(cfg, side) for side in weights):
        frozen = tuple(map(operator.or_, frozen, states))
    is_passed = not any(frozen) or (frozen == states and all(states))
    return frozen if is_passed else None


def num_states(one: Planned) -> int:
    """Returns the number of states that quantize each weight of a contraction."""
    frozen, of_weights = frozen_per_step(one) or (), weights_per_step(one)
    pairs = zip(one.site.lengths, frozen, of_weights, strict=False)
    return math.prod(n for n, each, of_weight in pairs if each and not of_weight)

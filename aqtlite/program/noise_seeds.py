"""Seeds of the noise of a program's contractions, from one key of the call."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax

from aqtlite import noise
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.program import keys
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned
from aqtlite.quantization.states.statistics import States

How = Callable[[Planned, States], Replacement]
"""Function from a contraction and its states, or a lookup, to its replacement."""


def seeded(how: How, key: jax.Array | None) -> How:
    """Returns a function whose replacements round stochastically by a key.

    Each contraction has a seed of its own, and so has each step of a scan around it,
    unless steps share its calibration states. Inside `jax.shard_map`, noise stays
    seeded from operands.

    Args:
        how: function for replacements that seed noise from their operands.
        key: key of the call, typed or raw; None leaves the seeds to the operands.
    """
    return how if key is None else functools.partial(_seeded, how, key)


def _seeded(how: How, key: jax.Array, one: Planned, states: States) -> Replacement:
    if not isinstance(one, PlannedContraction) or not one.cfg.needs_noise:
        return how(one, states)
    if "shard_map" in one.site.around:
        return how(one, states)  # Nothing can be given to it there.
    # Without states, each step of a scan can be given something of its own.
    per_step = one.site.per_step if one.collections else (True,) * len(one.site.lengths)
    lengths = tuple(itertools.compress(one.site.lengths, per_step))
    made = how(one, states._replace(seed=_seeds(key, one, lengths)))
    return dataclasses.replace(made, per_step=per_step)


def _seeds(
    key: jax.Array, one: PlannedContraction, lengths: tuple[int, ...]
) -> jax.Array:
    """Returns the seeds of the steps of scans, uint32 of shape ``(*lengths, 2)``."""
    seed_of = noise.seed_from_key
    for _ in lengths:
        seed_of = jax.vmap(seed_of)
    return seed_of(keys.of_steps(key, one, lengths))

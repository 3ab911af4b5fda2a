"""Interleaved timing of contestants: medians and quartiles."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

MIN_ROUNDS = 3
"""Rounds that are run whatever the time limit: fewer have no quartiles."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of several samples."""

    median: float
    lower_quartile: float
    upper_quartile: float
    repeats: int


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles of samples.

    >>> spread([4.0, 1.0, 2.0, 3.0, 5.0])
    Spread(median=3.0, lower_quartile=2.0, upper_quartile=4.0, repeats=5)
    """
    lower, median, upper = np.percentile(samples, [25, 50, 75]).tolist()
    return Spread(median, lower, upper, len(samples))


def alternate(
    programs: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Spread]:
    """Seconds that each program takes.

    Every program runs once unmeasured, which compiles it. Then each runs once in every
    round, so that other load on the machine affects all of them alike.

    Args:
        programs: by name; each returns arrays, which are waited for.
        repeats: rounds, at most.
        seconds: total time of the rounds after which none is started, except for the
            first `MIN_ROUNDS`.
        clock: the current time in seconds.
    """
    for program in programs.values():
        jax.block_until_ready(program())
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for done in range(repeats):
        if done >= MIN_ROUNDS and sum(map(sum, samples.values())) > seconds:
            break
        for name, program in programs.items():
            start = clock()
            jax.block_until_ready(program())
            samples[name].append(clock() - start)
    return {name: spread(taken) for name, taken in samples.items()}

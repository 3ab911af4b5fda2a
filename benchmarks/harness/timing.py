"""Interleaved timing of contestants: medians and quartiles."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

MIN_ROUNDS = 3
"""Rounds to run regardless of the time limit: quartiles need at least as many."""


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
    """Seconds per call of each program.

    Every program first runs once unmeasured, to compile. Then each runs once in every
    round, so that other load on the machine affects all programs alike.

    Args:
        programs: programs by name; each returns arrays, which are waited for.
        repeats: maximum number of rounds.
        seconds: total time after which no round is started, except for the first
            `MIN_ROUNDS`.
        clock: function that returns the current time in seconds.
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

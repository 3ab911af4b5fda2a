"""Figures of a contestant: metric, signal to noise, bytes and time."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness import timing
from benchmarks.pretrained.tasks.task import Arrays, Task

Call = Callable[..., Any]
"""A network as a function of its inputs."""

NOISE = 40.0
"""Signal to noise ratio of the control, in decibels, of a float network's input."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a contestant."""

    metric: float
    """In percent; see `Task.score`."""
    decibels: float | None
    """Signal to noise ratio of the outputs; None in float."""
    nbytes: int
    """Of the parameters, or of the file."""
    in_float: float
    """The part of these bytes that the network has in float."""
    times: Mapping[str, float]
    """Processor time of a batch, over that of each of the float networks, by name."""


def outputs_of(call: Call, batches: Sequence[Arrays]) -> list[Arrays]:
    """The outputs for all batches as NumPy arrays."""
    return [jax.tree.map(np.asarray, tuple(call(*batch))) for batch in batches]


def difference(a: Sequence[Arrays], b: Sequence[Arrays]) -> float:
    """The largest difference of two networks' outputs."""
    return max(
        float(np.abs(x - y).max())
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def decibels(exact: Sequence[Arrays], noisy: Sequence[Arrays]) -> float:
    """Signal to noise ratio of the first output."""
    pairs = [(one[0], other[0]) for one, other in zip(exact, noisy, strict=True)]
    signal = sum(float(np.square(x, dtype=np.float64).sum()) for x, _ in pairs)
    noise = sum(float(np.square(x - y, dtype=np.float64).sum()) for x, y in pairs)
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def noisy(batches: Sequence[Arrays]) -> list[Arrays] | None:
    """The batches with noise of `NOISE` decibels on the first input.

    None if the input is of integers, which have no small noise.
    """
    if not np.issubdtype(batches[0][0].dtype, np.floating):
        return None
    rng = np.random.default_rng(0)
    result = []
    for first, *others in batches:
        noise = rng.normal(size=first.shape) * np.sqrt(np.square(first).mean())
        perturbed = first + 10 ** (-NOISE / 20) * noise
        result.append((perturbed.astype(first.dtype), *others))
    return result


def measure(
    call: Call,
    nbytes: int,
    in_float: int,
    task: Task,
    exact: Sequence[Arrays] | None,
    baselines: Mapping[str, Call],
    rounds: int,
) -> Figures:
    """Runs a contestant on all data, and times it beside the float networks.

    Args:
        call: the contestant.
        nbytes: its bytes.
        in_float: those of the float network.
        task: the data and the metric.
        exact: outputs of the float network; None if this is the float network.
        baselines: the float networks, by name.
        rounds: rounds of the comparison of times.
    """
    outputs = outputs_of(call, task.batches)
    batch = task.batches[0]
    programs = {
        name: _program(one, batch) for name, one in {"": call, **baselines}.items()
    }
    taken = timing.alternate(programs, repeats=rounds, clock=time.process_time)
    own = taken.pop("").median
    return Figures(
        metric=task.score(outputs),
        decibels=None if exact is None else decibels(exact, outputs),
        nbytes=nbytes,
        in_float=nbytes / in_float,
        times={name: own / one.median for name, one in taken.items()},
    )


def _program(call: Call, batch: Arrays) -> Callable[[], Any]:
    return lambda: call(*batch)

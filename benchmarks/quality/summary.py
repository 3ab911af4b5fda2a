"""Statistics of the runs of each preset, over seeds."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.quality.records import Record


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean of several numbers, and how far they lie apart."""

    mean: float
    standard_error: float
    """Of the mean; NaN for a single number."""
    lowest: float
    highest: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """One preset."""

    preset: str
    seeds: int
    loss: Spread
    difference: Spread | None
    """To float32 of the same seed; None without a seed in common."""
    differences: list[float]
    """Of each seed in common."""
    validation_error: float
    """Standard error of the mean difference that comes from the validation set being
    finite, by the spread of its batches; NaN without a difference."""


def spread(values: Sequence[float]) -> Spread:
    """Mean, standard error and range.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, standard_error=0.577..., lowest=1.0, highest=3.0)
    """
    mean = float(np.mean(values))
    error = math.nan
    if len(values) > 1:
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Spread(mean, error, min(values), max(values))


def summarize(
    preset: str, records: Sequence[Record], baseline: Sequence[Record]
) -> Summary:
    """Statistics of one preset.

    Args:
        preset: its name.
        records: of its runs, at least one.
        baseline: the runs in float32.
    """
    losses = [float(np.mean(r.result.validation_losses)) for r in records]
    base = {r.seed: np.array(r.result.validation_losses) for r in baseline}
    batches = [
        np.array(r.result.validation_losses) - base[r.seed]
        for r in records
        if r.seed in base
    ]
    differences = [float(of_seed.mean()) for of_seed in batches]
    by_batch = np.mean(batches, axis=0).tolist() if batches else [math.nan]
    return Summary(
        preset,
        seeds=len(records),
        loss=spread(losses),
        difference=spread(differences) if differences else None,
        differences=differences,
        validation_error=spread(by_batch).standard_error,
    )

"""Statistics of each preset's runs over seeds."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.quality.records import Record


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean, standard error and range of several numbers."""

    mean: float
    standard_error: float
    """Standard error of the mean; NaN for a single number."""
    lowest: float
    highest: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """One preset."""

    preset: str
    seeds: int
    loss: Spread
    difference: Spread | None
    """Difference to float32 with the same seed; None without a common seed."""
    differences: list[float]
    """Difference for each common seed."""
    validation_error: float
    """Standard error of the mean difference due to the finite validation set, estimated
    from the spread over batches; NaN without a difference."""


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
        preset: name of the preset.
        records: runs of the preset, at least one.
        baseline: runs in float32.
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

"""What a network is measured with."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """Inputs, and what is expected of the outputs.

    All batches have one shape, so that a network is compiled once.
    """

    calibration: Sequence[Arrays]
    """Inputs of the network, of data that is not measured."""
    batches: Sequence[Arrays]
    """Inputs of the network, of the data that is measured."""
    sample: Sequence[Arrays]
    """Inputs for what runs a network hundreds of times: a few examples of those of
    `calibration`."""
    score: Callable[[Sequence[Arrays]], float]
    """The metric, in percent, of the network's outputs for all batches: larger is
    better, and 100 is perfect."""


def batched(rows: Sequence[np.ndarray], size: int) -> list[Arrays]:
    """Stacks inputs of one example into batches.

    Raises:
        ValueError: if the examples are no multiple of the size of a batch.
    """
    if len(rows) % size:
        raise ValueError(f"{len(rows)} examples are not batches of {size}")
    return [(np.stack(rows[i : i + size]),) for i in range(0, len(rows), size)]


SAMPLE = 4
"""Examples of a sample."""


def task_of(
    held: Sequence[np.ndarray],
    measured: Sequence[np.ndarray],
    size: int,
    score: Callable[[Sequence[Arrays]], float],
) -> Task:
    """The task of a network with one input, in batches of `size` examples."""
    return Task(
        calibration=batched(held, size),
        batches=batched(measured, size),
        sample=[(np.stack(held[:SAMPLE]),)],
        score=score,
    )

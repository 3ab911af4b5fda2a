"""The arrays of a target, read and quantized in the background as they are written."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent import futures

import numpy as np

from aqtlite.checkpoint import staging as staging_lib
from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray, checksum, is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.progress import OnBytes
from aqtlite.checkpoint.sources import Source


def work(job: Job, source: Source) -> int:
    """How many bytes will be read of the source."""
    names = [name for task in job.tasks for name in task.inputs]
    return sum(source.arrays[name].nbytes for name in (*names, *job.copies.values()))


@dataclasses.dataclass(frozen=True)
class Done:
    """What becomes known while a conversion runs."""

    checksums: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of the arrays, by name in the target."""

    decibels: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """Signal to noise of the frozen weights, by path."""


Frozen = futures.Future["futures.Future[staging_lib.Finished]"]
"""A weight that is being quantized, and then written to the staging folder."""


@contextlib.contextmanager
def freezing(
    job: Job,
    source: Source,
    staging: staging_lib.Staging,
    allow_nonfinite: bool,
    on_bytes: OnBytes,
) -> Iterator[list[Frozen]]:
    """Quantizes the weights that are not staged yet, in the background.

    One thread reads and computes, one weight at a time; another one writes the weight
    before it to disk. What waits for a weight is the writing of the target.
    """
    with (
        futures.ThreadPoolExecutor(1) as keeper,
        futures.ThreadPoolExecutor(1) as maker,
    ):
        kept: list[futures.Future[staging_lib.Finished]] = []

        def make(index: int, task: Task) -> futures.Future[staging_lib.Finished]:
            finished = staging.finished(index)
            if finished is not None:
                keep = keeper.submit(lambda: finished)
            else:
                arrays, decibels = _make(task, source, allow_nonfinite)
                if kept:
                    kept.pop().result()
                keep = keeper.submit(staging.put, index, arrays, decibels)
                kept.append(keep)
            on_bytes(sum(source.arrays[n].nbytes for n in task.inputs), task.path)
            return keep

        made = [maker.submit(make, i, task) for i, task in enumerate(job.tasks)]
        try:
            yield made
        finally:
            maker.shutdown(cancel_futures=True)


def _make(
    task: Task, source: Source, allow_nonfinite: bool
) -> tuple[dict[str, np.ndarray], float | None]:
    """One weight, and its signal-to-noise ratio in dB."""
    inputs = [source.read(name) for name in task.inputs]
    made = task.make(*inputs)
    arrays = {
        "qvalue": np.asarray(made.qtensor.qvalue),
        "scale": np.asarray(made.qtensor.scale),
    }
    if made.identity is not None:
        arrays["identity"] = np.asarray(made.identity)
    # NaN and infinities of a weight are in its scales.
    if not allow_nonfinite and not is_finite(arrays["scale"]):
        for name, x in zip(task.inputs, inputs, strict=True):
            _check_finite(source, name, x)
        raise CheckpointError(
            f"the scales of {task.path} are not finite, though its parameters are: the "
            "model itself makes infinities or NaN of them"
        )
    signal, noise = float(made.signal), float(made.noise)
    decibels = 10 * float(np.log10(signal / noise)) if signal and noise else None
    return arrays, decibels


def _check_finite(source: Source, name: str, x: np.ndarray) -> None:
    if not is_finite(x):
        raise CheckpointError(
            f"{name} in {source.path} holds NaN or infinite values; "
            "--allow-nonfinite (allow_nonfinite=True) converts it all the same"
        )


def frozen_arrays(
    job: Job, staging: staging_lib.Staging, frozen: Sequence[Frozen], done: Done
) -> list[LazyArray]:
    """The integers and scales of the weights, each ready when it is read."""

    def lazy(index: int, field: str, name: str, info: ArrayInfo) -> LazyArray:
        def read() -> np.ndarray:
            finished = frozen[index].result().result()
            done.checksums[name] = finished.checksums[field]
            done.decibels[job.tasks[index].path] = finished.decibels
            return staging.get(index, field, info)

        return LazyArray(name, info, read)

    return [
        lazy(index, field, name, info)
        for index, task in enumerate(job.tasks)
        for field, (name, info) in task.fields.items()
    ]


def copied_arrays(
    job: Job,
    source: Source,
    done: Done,
    allow_nonfinite: bool,
    on_bytes: OnBytes,
) -> list[LazyArray]:
    """The arrays that stay as they are."""

    def lazy(name: str, origin: str) -> LazyArray:
        info = source.arrays[origin]

        def read() -> np.ndarray:
            x = source.read(origin)
            if not allow_nonfinite:
                _check_finite(source, origin, x)
            done.checksums[name] = checksum(x)
            on_bytes(info.nbytes, name)
            return x

        return LazyArray(name, info, read)

    return [lazy(name, origin) for name, origin in job.copies.items()]

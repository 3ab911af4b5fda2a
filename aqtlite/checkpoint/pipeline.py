"""Production of the target's arrays in background threads, while they are written."""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint import staging as staging_lib
from aqtlite.checkpoint.arrays import LazyArray, checksum, is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.manifest import Stored
from aqtlite.checkpoint.progress import OnBytes
from aqtlite.program.serving.integers import handed_over


def work(job: Job, source: Reader) -> int:
    """Number of bytes that a job reads from the source."""
    names = [name for task in job.tasks for name in task.inputs]
    return sum(source.arrays[name].nbytes for name in (*names, *job.copies.values()))


@dataclasses.dataclass(frozen=True)
class Done:
    """Checksums and signal-to-noise ratios, filled in while a conversion runs."""

    checksums: dict[str, int] = dataclasses.field(default_factory=dict)
    """Checksums by name of the array in the target."""

    decibels: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """Signal-to-noise ratios by path of the frozen weight."""


Frozen = futures.Future["futures.Future[staging_lib.Finished]"]
"""A weight that is being quantized; the inner future is its write to the staging
folder."""


@contextlib.contextmanager
def freezing(
    job: Job,
    source: Reader,
    staging: staging_lib.Staging,
    allow_nonfinite: bool,
    on_bytes: OnBytes,
) -> Iterator[list[Frozen]]:
    """Quantizes the weights that are not staged yet, in the background.

    One thread reads and quantizes one weight at a time, while another writes the
    previous one to the staging folder. The writer of the target waits for both.
    """
    with (
        futures.ThreadPoolExecutor(1) as keeper,
        futures.ThreadPoolExecutor(1) as maker,
    ):
        kept: list[futures.Future[staging_lib.Finished]] = []

        def make(index: int, task: Task) -> futures.Future[staging_lib.Finished]:
            finished = staging.finished(index, task.fields)
            # One that allowed NaN may have staged it: made again, it is refused.
            if finished is not None and (
                allow_nonfinite or _is_staged_finite(job, index, task, staging)
            ):
                keep = keeper.submit(lambda: finished)
            else:
                arrays, decibels = _make(job, task, source, allow_nonfinite)
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
    job: Job, task: Task, source: Reader, allow_nonfinite: bool
) -> tuple[dict[str, np.ndarray], float | None]:
    """Quantizes one weight; returns its arrays as stored, and its SNR in dB."""
    read = [source.read_weight(name) for name in task.inputs]
    inputs = [x for x, _ in read]
    made = task.make(*inputs)
    sources = [quantized for _, quantized in read if quantized is not None]
    if len(sources) == len(inputs) == 1 and made.damping is None:
        given = handed_over(made.qtensor, sources, task.prepared)
        if given is not None:
            made = made._replace(qtensor=given, noise=jnp.zeros_like(made.noise))
    made = made._replace(qtensor=task.store(made.qtensor))
    arrays = {}
    for field, name in task.fields.items():
        owner = made if field == "identity" else made.qtensor
        (leaf,) = jax.tree.leaves(operator.attrgetter(field)(owner))
        x = np.asarray(leaf)
        arrays[field] = _stored(x, job.manifest.arrays[name])
    scales = (arrays[field] for field in _scales(task))
    if not allow_nonfinite and not all(map(is_finite, scales)):
        for name, x in zip(task.inputs, inputs, strict=True):
            _check_finite(source, name, x)
        raise CheckpointError(
            f"the scales of {task.path} are not finite, though its parameters are: the "
            "model itself makes infinities or NaN of them"
        )
    return arrays, _recorded_decibels(float(made.signal), float(made.noise))


def _scales(task: Task) -> list[str]:
    """Fields that NaN and infinities in a weight make NaN or infinite."""
    return [field for field in task.fields if field.startswith("scale")]


def _is_staged_finite(
    job: Job, index: int, task: Task, staging: staging_lib.Staging
) -> bool:
    infos = {f: job.manifest.arrays[task.fields[f]].on_disk for f in _scales(task)}
    return all(is_finite(staging.get(index, f, info)) for f, info in infos.items())


def _recorded_decibels(signal: float, noise: float) -> float | None:
    """Returns a signal-to-noise ratio with the two decimals that a manifest holds.

    A conversion reports what is read from its checkpoint later.
    """
    if not signal or not noise or np.isnan(signal / noise):
        return None
    return round(10 * float(np.log10(signal / noise)), 2)


def _stored(x: np.ndarray, stored: Stored) -> np.ndarray:
    return stored.packing.pack(x) if stored.packing else x


def _check_finite(source: Reader, name: str, x: np.ndarray) -> None:
    if not is_finite(x):
        raise CheckpointError(
            f"{name} in {source.path} holds NaN or infinite values; "
            "--allow-nonfinite (allow_nonfinite=True) converts it all the same"
        )


def frozen_arrays(
    job: Job, staging: staging_lib.Staging, frozen: Sequence[Frozen], done: Done
) -> list[LazyArray]:
    """The arrays of the frozen weights; reading one waits until it is staged."""

    def lazy(index: int, field: str, name: str) -> LazyArray:
        info = job.manifest.arrays[name].on_disk

        def read() -> np.ndarray:
            finished = frozen[index].result().result()
            done.checksums[name] = finished.checksums[field]
            done.decibels[job.tasks[index].path] = finished.decibels
            return staging.get(index, field, info)

        return LazyArray(name, info, read)

    return [
        lazy(index, field, name)
        for index, task in enumerate(job.tasks)
        for field, name in task.fields.items()
    ]


def copied_arrays(
    job: Job,
    source: Reader,
    done: Done,
    allow_nonfinite: bool,
    on_bytes: OnBytes,
) -> list[LazyArray]:
    """The arrays that are copied from the source."""

    def lazy(name: str, origin: str) -> LazyArray:
        stored = job.manifest.arrays[name]

        def read() -> np.ndarray:
            x = source.read(origin)
            if not allow_nonfinite:
                _check_finite(source, origin, x)
            x = _stored(x, stored)
            done.checksums[name] = checksum(x)
            on_bytes(stored.info.nbytes, name)
            return x

        return LazyArray(name, stored.on_disk, read)

    return [lazy(name, origin) for name, origin in job.copies.items()]

"""The conversion of a checkpoint on disk, one weight at a time."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import rich.console
from flax import linen as nn

from aqtlite.checkpoint import manifest as manifest_lib
from aqtlite.checkpoint import staging as staging_lib
from aqtlite.checkpoint import targets
from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray, checksum, is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.from_model import job_from_model
from aqtlite.checkpoint.from_rules import Rule, job_from_rules
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.progress import OnBytes, byte_progress
from aqtlite.checkpoint.report import Report, report_of
from aqtlite.checkpoint.sources import Source, open_source

_REPLACED = "replaced"
_MARGIN = 1 << 24  # of disk space, for metadata


def convert_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    model: nn.Module,
    *sample_args: Any,
    sample_kwargs: Mapping[str, Any] | None = None,
    keep_float: Sequence[str] = (),
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    console: rich.console.Console | None = None,
) -> Report:
    """Converts the checkpoint of a trained model into one for serving.

    What `aqtlite.flax.convert` does in memory, from disk to disk: the model is traced
    with shapes alone, and the part of the trace that makes a frozen weight is run for
    one weight at a time, of parameters that are read when it needs them. The arrays
    are the same, bit for bit.

    The target appears whole or not at all. What is finished of an interrupted
    conversion lies beside it, in a folder ``.NAME.converting``, and the same call goes
    on from there.

    Args:
        source: an Orbax checkpoint of the variables, or of their collection "params"
            alone; a safetensors file or a folder of them; or a ``.msgpack`` file of
            `flax.serialization.to_bytes`. float32, bfloat16 or float16.
        target: where to write: a file if it ends in ``.safetensors``, else a folder,
            for Orbax.
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside.
        *sample_args: what ``model.apply(variables, *sample_args)`` takes in serving,
            or shapes of it (`jax.ShapeDtypeStruct`).
        sample_kwargs: the same, by name.
        keep_float: patterns (``*`` matches anything) of the paths of weights, or of
            the parameters that they are made of, to leave in float.
        allow_nonfinite: whether to convert weights that hold NaN or infinities.
        overwrite: whether to replace a target that is there.
        dry_run: whether to plan only, and write nothing.
        console: where to show progress and a summary; None is silent.

    Returns:
        What was done: each weight with its sizes and its signal-to-noise ratio.

    Raises:
        CheckpointError: if the source is damaged, holds no such model, holds NaN, or
            is converted already; if the target is there; or if the disk is full.
        ValueError: if the model has nothing to freeze, as `aqtlite.flax.convert`.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> from flax import serialization
    >>> from aqtlite import checkpoint, config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> dense = nn.Dense(64, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "v.msgpack").write_bytes(serialization.to_bytes(variables))
    >>> report = convert_checkpoint(folder / "v.msgpack", folder / "serving", dense, x)
    >>> report.bytes_before, report.bytes_after
    (16640, 4608)
    >>> serving = checkpoint.load_serving(folder / "serving", dense)
    >>> bool((dense.apply(serving, x) == dense.apply(variables, x)).all())
    True
    """
    opened = _open_float(pathlib.Path(source))
    kwargs = dict(sample_kwargs or {})
    job = job_from_model(opened.arrays, model, sample_args, kwargs, keep_float)
    return _convert(
        job, opened, pathlib.Path(target), allow_nonfinite, overwrite, dry_run, console
    )


def convert_by_rules(
    source: str | os.PathLike,
    target: str | os.PathLike,
    rules: Sequence[Rule],
    *,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    console: rich.console.Console | None = None,
) -> Report:
    """Converts a checkpoint without its model: parameters are named by rules.

    A parameter that is frozen becomes a `QTensor` where it was, which
    `aqtlite.make_dot_general` takes as an operand.

    Args:
        source: as in `convert_checkpoint`.
        target: the same.
        rules: of which the first that matches a parameter's path counts.
        allow_nonfinite: as in `convert_checkpoint`.
        overwrite: the same.
        dry_run: the same.
        console: the same.

    Raises:
        CheckpointError: as `convert_checkpoint`, and if a rule matches nothing.
    """
    opened = _open_float(pathlib.Path(source))
    job = job_from_rules(opened, rules)
    return _convert(
        job, opened, pathlib.Path(target), allow_nonfinite, overwrite, dry_run, console
    )


def _open_float(path: pathlib.Path) -> Source:
    source = open_source(path)
    if source.manifest() is not None:
        raise CheckpointError(
            f"{path} is converted already; name the float checkpoint of training"
        )
    return source


def _convert(
    job: Job,
    source: Source,
    target: pathlib.Path,
    allow_nonfinite: bool,
    overwrite: bool,
    dry_run: bool,
    console: rich.console.Console | None,
) -> Report:
    """The pass itself."""
    _check_names(job, source)
    writer = targets.target_for(target)
    writer.check(job.manifest.arrays)
    folder = target.parent / f".{target.name}.converting"
    start = time.perf_counter()
    try:
        _finish_a_replacement(target, folder)
        _check_target(source, target, overwrite)
        if dry_run:
            return report_of(job.manifest, seconds=None)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = staging_lib.Staging(folder, _key(job, source))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    done = _Done(job)
    try:
        _check_space(job, target)
        with (
            byte_progress(console, _work(job, source)) as on_bytes,
            _freezing(job, source, staging, allow_nonfinite, on_bytes) as frozen,
        ):
            arrays = [
                *_frozen_arrays(job, staging, frozen, done),
                *_copied_arrays(job, source, done, allow_nonfinite, on_bytes),
            ]
            out = staging.folder / f"out{target.suffix}"
            if out.exists():
                staging_lib.remove(out)
            writer.write(out, arrays, lambda: manifest_lib.to_json(done.manifest()))
            staging_lib.sync_tree(out)
        _publish(out, target, staging.folder)
        staging.discard()
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{target} could not be written: {error}. What is finished lies in "
            f"{staging.folder}; the same command goes on from there"
        ) from error
    finally:
        staging.close()
    report = report_of(done.manifest(), time.perf_counter() - start)
    if console is not None:
        console.print(report.table())
    return report


def _check_names(job: Job, source: Source) -> None:
    """Refuses names that could lead out of the target's folder."""
    for name in job.manifest.arrays:
        if any(step in ("", ".", "..") or "\0" in step for step in name.split("/")):
            raise CheckpointError(f"{source.path} names an array {name!r}")


def _check_target(source: Source, target: pathlib.Path, overwrite: bool) -> None:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link; name what it points to")
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists; --overwrite (overwrite=True) replaces it"
        )
    here, there = source.path.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(
            f"the target {target} and the source {source.path} lie in one another; "
            "name a target beside it"
        )
    if target.exists() and not _is_converted(target):
        raise CheckpointError(
            f"{target} is no converted checkpoint, and is not replaced; remove it first"
        )


def _is_converted(target: pathlib.Path) -> bool:
    """Whether it is a converted checkpoint, or an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return True
    try:
        return open_source(target).manifest() is not None
    except CheckpointError:
        return False


def _key(job: Job, source: Source) -> str:
    """Tells conversions apart: by the source's files, and by all that is planned."""
    files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in source.files()]
    plan = manifest_lib.to_json(job.manifest)
    text = json.dumps([str(source.path.resolve()), files, plan])
    return hashlib.sha256(text.encode()).hexdigest()


def _check_space(job: Job, target: pathlib.Path) -> None:
    written = sum(one.info.nbytes for one in job.manifest.arrays.values())
    staged = sum(info.nbytes for t in job.tasks for _, info in t.fields.values())
    needed = written + staged + _MARGIN
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"the disk of {target} has {free / 1e9:.2f} GB free, and the conversion "
            f"needs {needed / 1e9:.2f} GB"
        )


def _work(job: Job, source: Source) -> int:
    """How many bytes will be read of the source."""
    names = [name for task in job.tasks for name in task.inputs]
    return sum(source.arrays[name].nbytes for name in (*names, *job.copies.values()))


class _Done:
    """What becomes known while a conversion runs."""

    def __init__(self, job: Job):
        self._job = job
        self.checksums: dict[str, int] = {}
        self.decibels: dict[str, float | None] = {}

    def manifest(self) -> manifest_lib.Manifest:
        """The manifest, with what is known by now."""
        return manifest_lib.completed(self._job.manifest, self.checksums, self.decibels)


_Frozen = futures.Future["futures.Future[staging_lib.Finished]"]


@contextlib.contextmanager
def _freezing(
    job: Job,
    source: Source,
    staging: staging_lib.Staging,
    allow_nonfinite: bool,
    on_bytes: OnBytes,
) -> Iterator[list[_Frozen]]:
    """Makes every weight that does not lie ready, beside what else is done.

    One thread reads and computes, one weight at a time; another one keeps the weight
    before it on disk. What waits for a weight is the writing of the target.
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


def _frozen_arrays(
    job: Job, staging: staging_lib.Staging, frozen: Sequence[_Frozen], done: _Done
) -> list[LazyArray]:
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


def _copied_arrays(
    job: Job,
    source: Source,
    done: _Done,
    allow_nonfinite: bool,
    on_bytes: OnBytes,
) -> list[LazyArray]:
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


def _publish(out: pathlib.Path, target: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts what was written in its place, at once."""
    if target.exists():
        target.rename(folder / _REPLACED)
    out.rename(target)
    staging_lib.sync(target.parent)


def _finish_a_replacement(target: pathlib.Path, folder: pathlib.Path) -> None:
    """Where the process ended in one: the new target counts, or else the old one."""
    aside = folder / _REPLACED
    if not aside.exists():
        return
    if target.exists():
        staging_lib.remove(aside)
    else:
        aside.rename(target)

"""The conversion of a checkpoint on disk, one weight at a time."""

import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from flax import linen as nn

from aqtlite.checkpoint import manifest as manifest_lib
from aqtlite.checkpoint import pipeline, replacement, targets
from aqtlite.checkpoint import staging as staging_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.from_model import job_from_model
from aqtlite.checkpoint.from_rules import Rule, job_from_rules
from aqtlite.checkpoint.job import Job
from aqtlite.checkpoint.names import check_tree
from aqtlite.checkpoint.progress import byte_progress
from aqtlite.checkpoint.report import Report, report_of
from aqtlite.checkpoint.sources import Source, open_source

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
            `flax.serialization.to_bytes`. float32, bfloat16 or float16, with or
            without the model's partitioning metadata (`nn.with_partitioning`).
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
    job = job_from_model(opened, model, sample_args, kwargs, keep_float)
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
    `aqtlite.make_dot_general` takes as an operand. All else is copied: arrays, and of
    msgpack files and Orbax numbers, strings and None.

    Args:
        source: as in `convert_checkpoint`.
        target: the same.
        rules: of which the first that matches a parameter's path counts.
        allow_nonfinite: as in `convert_checkpoint`.
        overwrite: the same.
        dry_run: the same.
        console: the same.

    Raises:
        CheckpointError: as `convert_checkpoint`; if a rule matches nothing; and if
            something cannot be copied, or the names of two arrays do not fit into one
            tree of dictionaries, or not into the format of the target.
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
    check_tree([*source.arrays, *source.values], str(path))
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
    """Does the job."""
    writer = targets.target_for(target)
    check_tree(job.manifest.arrays, str(source.path))
    writer.check(job.manifest.arrays)
    start = time.perf_counter()
    try:
        replacement.check_place(source.path, target)
        if dry_run:
            replacement.check_existing(target, overwrite)
            return report_of(job.manifest, seconds=None)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = staging_lib.Staging(target.parent / f".{target.name}.converting")
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    done = pipeline.Done()

    def manifest() -> manifest_lib.Manifest:
        return manifest_lib.completed(job.manifest, done.checksums, done.decibels)

    try:
        replacement.recover(target, staging.folder)
        replacement.check_existing(target, overwrite)
        _check_space(job, target)
        staging.claim(_key(job, source))
        with (
            byte_progress(console, pipeline.work(job, source)) as on_bytes,
            pipeline.freezing(
                job, source, staging, allow_nonfinite, on_bytes
            ) as frozen,
        ):
            arrays = [
                *pipeline.frozen_arrays(job, staging, frozen, done),
                *pipeline.copied_arrays(job, source, done, allow_nonfinite, on_bytes),
            ]
            out = staging.folder / f"out{target.suffix}"
            if out.exists():
                staging_lib.remove(out)
            writer.write(out, arrays, lambda: manifest_lib.to_json(manifest()))
            staging_lib.sync_tree(out)
        replacement.publish(out, target, staging.folder)
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
    report = report_of(manifest(), time.perf_counter() - start)
    if console is not None:
        console.print(report.table())
    return report


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

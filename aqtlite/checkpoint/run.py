"""Execution of a job: staging, writing, publishing."""

import contextlib
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Iterator

import rich.console
from absl import logging
from rich import filesize

from aqtlite.checkpoint import manifest_json, pipeline, replacement
from aqtlite.checkpoint import staging as staging_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader, Writer, writer_for
from aqtlite.checkpoint.job import Job
from aqtlite.checkpoint.manifest import Manifest, completed
from aqtlite.checkpoint.names import check_tree
from aqtlite.checkpoint.progress import byte_progress
from aqtlite.checkpoint.report import Report, report_of, size_of, summary

_MARGIN = 1 << 24  # bytes of disk space for metadata


def check(job: Job, source: Reader, target: pathlib.Path) -> Writer:
    """Checks that a job can run, without writing anything.

    Returns:
        The writer of the target.

    Raises:
        CheckpointError: if the target's format cannot hold the arrays, or if one of
            target and source contains the other.
    """
    writer = writer_for(target)
    check_tree(job.manifest.arrays, str(source.path))
    writer.check({name: one.on_disk for name, one in job.manifest.arrays.items()})
    with _naming(target):
        replacement.check_place(source.path, target)
    return writer


def plan(job: Job, source: Reader, target: pathlib.Path, overwrite: bool) -> Report:
    """Checks a job and the path of its target, and reports what `run` would do."""
    check(job, source, target)
    replacement.check_existing(target, overwrite)
    return report_of(job.manifest)


def run(
    job: Job,
    source: Reader,
    target: pathlib.Path,
    allow_nonfinite: bool,
    overwrite: bool,
    console: rich.console.Console | None,
) -> Report:
    """Runs a job; arguments as for `convert_checkpoint`."""
    writer, key = check(job, source, target), _key(job, source)
    start = time.perf_counter()
    with _naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = staging_lib.Staging(target.parent / f".{target.name}.converting")
    try:
        with _naming(target):
            replacement.recover(target, staging.folder)
            replacement.check_existing(target, overwrite)
            _check_space(job, target)
            staging.claim(key)
        done = _write(job, source, target, writer, staging, allow_nonfinite, console)
    finally:
        staging.close()
    quantized = [
        task.path for task in job.tasks if not source.quantized.isdisjoint(task.inputs)
    ]
    seconds = time.perf_counter() - start
    report = report_of(done, seconds, size_of(target), quantized)
    logging.info("converted %s to %s: %s", source.path, target, summary(report))
    return report


def _write(
    job: Job,
    source: Reader,
    target: pathlib.Path,
    writer: Writer,
    staging: staging_lib.Staging,
    allow_nonfinite: bool,
    console: rich.console.Console | None,
) -> Manifest:
    """Writes the target; errors name the staging folder that is left behind."""
    done = pipeline.Done()

    def manifest() -> Manifest:
        return completed(job.manifest, done.checksums, done.decibels)

    work = pipeline.work(job, source)
    logging.info("converting %d bytes of %s to %s", work, source.path, target)
    try:
        with (
            byte_progress(console, work) as on_bytes,
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
            writer.write(out, arrays, lambda: manifest_json.to_json(manifest()))
            staging_lib.sync_tree(out)
        replacement.publish(out, target, staging.folder)
        staging.discard()
    except BaseException as error:
        rest = (
            f"The weights that are done are in {staging.folder}: the same command "
            "resumes there; otherwise remove that folder"
        )
        if replacement.is_aside(target, staging.folder):
            rest = (
                f"The earlier checkpoint of {target} is in {staging.folder}: the same "
                "command moves it back and resumes there; do not remove that folder"
            )
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}. {rest}") from error
        if isinstance(error, OSError | ValueError):
            raise CheckpointError(
                f"{target} could not be written: {error}. {rest}"
            ) from error
        error.add_note(rest)
        raise
    return manifest()


@contextlib.contextmanager
def _naming(target: pathlib.Path) -> Iterator[None]:
    """Names the target in errors of the file system."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def _key(job: Job, source: Reader) -> str:
    """A hash that identifies a conversion: of the source's files and the plan."""
    files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in source.files()]
    place = [str(source.path.resolve()), *source.subtree, source.in_memory]
    text = json.dumps([place, files, manifest_json.to_json(job.manifest)])
    return hashlib.sha256(text.encode()).hexdigest()


def _check_space(job: Job, target: pathlib.Path) -> None:
    sizes = {name: one.on_disk.nbytes for name, one in job.manifest.arrays.items()}
    staged = sum(sizes[name] for task in job.tasks for name in task.fields.values())
    needed = sum(sizes.values()) + staged + _MARGIN
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"the disk of {target} has {filesize.decimal(free)} free, and the "
            f"conversion needs {filesize.decimal(needed)}"
        )

"""Replacement of a target, so that a complete checkpoint always exists.

A file is replaced in one step. Of folders, the old one is first moved into the staging
folder, and removed together with it: for a moment nothing is at the target's path. If
moving the new one there fails, the old one is moved back; if the process is killed in
that moment, the next conversion moves it back.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from aqtlite.checkpoint import manifest_json, one_process, staging
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import open_reader, writer_for

_REPLACED = "replaced"


def check_place(source: pathlib.Path, target: pathlib.Path) -> None:
    """Checks that neither of target and source contains the other.

    Raises:
        CheckpointError: if one contains the other, or if the target is a symbolic link.
    """
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link; name what it points to")
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(
            f"one of the target {target} and the source {source} contains the other; "
            "name a target beside it"
        )


def check_existing(target: pathlib.Path, overwrite: bool) -> None:
    """Checks that the target's path is free, or holds something that may be replaced.

    Raises:
        CheckpointError: if the path exists and `overwrite` is False, or if it is
            neither an empty folder nor a converted checkpoint.
    """
    if not target.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists; --overwrite (overwrite=True) replaces it"
            + one_process.advice()
        )
    if not _is_converted(target):
        raise CheckpointError(
            f"{target} is no converted checkpoint, or holds something else beside it, "
            "and is not replaced; remove it first"
        )


def _is_converted(target: pathlib.Path) -> bool:
    """Whether a path is an empty folder, or a converted checkpoint and nothing else."""
    if target.is_dir() and not os.listdir(target):
        return True
    try:
        source = open_reader(target)
        text = source.manifest()
        if text is None or source.path != target:
            return False
        names = manifest_json.from_json(text, str(target)).arrays.keys()
        return source.arrays.keys() <= names and writer_for(target).owns(target, names)
    except CheckpointError:
        return False


def publish(out: pathlib.Path, target: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves a new checkpoint to the target's path.

    Args:
        out: path of the new checkpoint.
        target: path to move it to.
        folder: the staging folder, which this process has locked.
    """
    if target.is_dir():
        try:
            target.rename(folder / _REPLACED)
            out.rename(target)
        except BaseException:  # Ctrl-C included.
            recover(target, folder)
            raise
    else:
        out.replace(target)
    staging.sync(target.parent)


def recover(target: pathlib.Path, folder: pathlib.Path) -> None:
    """Recovers from an interrupted `publish`.

    Moves the old target back, unless the new one is in its place already. The caller
    has to hold the lock of the staging folder: another process may be in `publish`.
    """
    aside = folder / _REPLACED
    if is_aside(target, folder):
        aside.rename(target)
    elif aside.exists():
        staging.remove(aside)


def is_aside(target: pathlib.Path, folder: pathlib.Path) -> bool:
    """Whether the only checkpoint is an old one that `publish` moved aside."""
    return (folder / _REPLACED).exists() and not target.exists()


@contextlib.contextmanager
def noticed(path: pathlib.Path) -> Iterator[None]:
    """Replaces the errors of reading a path whose file or folder was replaced.

    Raises:
        CheckpointError: if reading fails, and the path leads to another file by now.
    """
    before = _identity(path)
    try:
        yield
    except (CheckpointError, OSError) as error:
        if _identity(path) != before:
            raise CheckpointError(
                f"{path} was replaced while it was read; load it again"
            ) from error
        raise


def _identity(path: pathlib.Path) -> tuple[int, ...] | None:
    """What tells the file or folder at a path from the next; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns

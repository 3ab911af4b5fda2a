"""Putting a target in its place, so that there is always a whole one.

What a target replaces is moved into the staging folder and removed with it. A process
that ends in between leaves the old one there, for the next conversion to put back.
"""

import os
import pathlib

from aqtlite.checkpoint import manifest as manifest_lib
from aqtlite.checkpoint import staging, targets
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.sources import open_source

_REPLACED = "replaced"


def check_place(source: pathlib.Path, target: pathlib.Path) -> None:
    """Checks that a target would lie beside its source.

    Raises:
        CheckpointError: if one contains the other, or if the target is a link.
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
    """Checks that what lies in a target's place, if anything does, may be replaced.

    Raises:
        CheckpointError: if `overwrite` is False, or if it is anything but a converted
            checkpoint.
    """
    if not target.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists; --overwrite (overwrite=True) replaces it"
        )
    if not _is_converted(target):
        raise CheckpointError(
            f"{target} is no converted checkpoint, or holds something else beside it, "
            "and is not replaced; remove it first"
        )


def _is_converted(target: pathlib.Path) -> bool:
    """Whether there is a converted checkpoint and nothing else, or an empty folder."""
    if target.is_dir() and not os.listdir(target):
        return True
    try:
        source = open_source(target)
        text = source.manifest()
        if text is None or source.path != target:
            return False
        names = manifest_lib.from_json(text, str(target)).arrays.keys()
        return source.arrays.keys() <= names and targets.target_for(target).owns(
            target, names
        )
    except CheckpointError:
        return False


def publish(out: pathlib.Path, target: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves what was written to the target's place.

    Args:
        out: what was written.
        target: where it goes.
        folder: of the staging, which this process has locked.
    """
    if target.exists():
        target.rename(folder / _REPLACED)
    out.rename(target)
    staging.sync(target.parent)


def recover(target: pathlib.Path, folder: pathlib.Path) -> None:
    """Finishes what a process that ended in `publish` began.

    If the new target is in its place it counts, else the old one is put back. Only
    for a process that has locked the staging folder: another one may be in `publish`.
    """
    aside = folder / _REPLACED
    if not aside.exists():
        return
    if target.exists():
        staging.remove(aside)
    else:
        aside.rename(target)

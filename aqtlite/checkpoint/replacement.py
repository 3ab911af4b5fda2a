"""Replacing a target, so that there is always a whole one.

The old target is moved into the staging folder and removed with it. A process that ends
in between leaves it there, and the next conversion puts it back.
"""

import os
import pathlib

from aqtlite.checkpoint import manifest_json, staging
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import open_reader, writer_for

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
    """Checks that nothing is at a target's path, or nothing that must not be replaced.

    Raises:
        CheckpointError: if something is and `overwrite` is False, or if it is anything
            but a converted checkpoint.
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
    """Whether there is an empty folder, or a converted checkpoint and nothing else."""
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
        out: the new checkpoint.
        target: path of the checkpoint from now on.
        folder: the staging folder, which this process has locked.
    """
    if target.exists():
        target.rename(folder / _REPLACED)
    out.rename(target)
    staging.sync(target.parent)


def recover(target: pathlib.Path, folder: pathlib.Path) -> None:
    """Recovers from a crash in `publish`.

    If the new target is at its path it counts, else the old one is put back. Only for
    a process that has locked the staging folder: another one may be in `publish`.
    """
    aside = folder / _REPLACED
    if not aside.exists():
        return
    if target.exists():
        staging.remove(aside)
    else:
        aside.rename(target)

"""New files and folders, which get their names when they are whole."""

import contextlib
import errno
import fcntl
import os
import pathlib
import tempfile
from collections.abc import Iterator

from aqtlite.checkpoint import staging
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.errors import UnwritableError

_START, _END = ".aqtlite-", ".unfinished"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of writing, and never of reading."""


@contextlib.contextmanager
def new_path(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write to, in a folder of the writer's own beside `path`.

    What is written is renamed to `path` once it is whole. Folders that killed writers
    to the same path left behind are removed.

    Raises:
        CheckpointError: if the path exists, even if another writer makes it in the
            meantime, or if its folder does not exist.
        UnwritableError: if it cannot be written, as of a full disk.
    """
    if os.path.lexists(path):
        raise _exists(path)
    parent = path.absolute().parent
    if not parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent} to write into")
    _remove_left(parent, path.name)
    with _named(path, parent), _own_folder(parent) as own:
        unfinished = own / path.name
        yield unfinished
        staging.sync_tree(unfinished)
        _publish(unfinished, path)
        staging.sync(parent)


@contextlib.contextmanager
def _named(path: pathlib.Path, parent: pathlib.Path) -> Iterator[None]:
    """Names a path in the errors of writing it, which have a file of this module.

    Errors of writing to an open file have none; those of reading what is written, from
    a file of the user's, stay as they are.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        own = os.fspath(parent / _START)
        is_own = isinstance(name, str) and name.startswith(own)
        if not is_own and (name is not None or error.errno not in _NO_ROOM):
            raise
        why = error.strerror or str(error)
        raise UnwritableError(error.errno, why, os.fspath(path)) from error


@contextlib.contextmanager
def _own_folder(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that this process alone writes, locked until it is removed."""
    made = pathlib.Path(tempfile.mkdtemp(".new", _START, parent))
    own = made.with_suffix(_END)
    lock = os.open(made, os.O_RDONLY)
    try:
        _try_lock(lock)  # Where it fails, no writer removes what others left.
        made.rename(own)  # Locked before others may look at it.
        try:
            yield own
        finally:
            staging.remove(own)
    finally:
        os.close(lock)


def _remove_left(parent: pathlib.Path, name: str) -> None:
    """Removes folders of writers to a name that were stopped before they were done."""
    for folder in parent.glob(f"{_START}*{_END}"):
        with contextlib.suppress(OSError):  # Another writer's, or just removed.
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if {*os.listdir(lock)} <= {name} and _try_lock(lock):
                    staging.remove(folder)
            finally:
                os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Locks a folder; False if another process has, or the file system cannot."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _publish(unfinished: pathlib.Path, path: pathlib.Path) -> None:
    """Moves what was written to a path, unless another writer was there first."""
    if unfinished.is_dir():
        try:
            unfinished.rename(path)
        except OSError as error:
            # No folder that holds something is replaced.
            if os.path.lexists(path):
                raise _exists(path) from error
            raise
        return
    try:
        # Renaming would replace a file that has appeared; linking does not.
        os.link(unfinished, path)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError:  # The file system has no links.
        _replace_own(unfinished, path)


def _replace_own(unfinished: pathlib.Path, path: pathlib.Path) -> None:
    """Replaces an empty file, made here, by what was written."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise _exists(path) from error
    try:
        unfinished.replace(path)
    except OSError:
        path.unlink()
        raise


def _exists(path: pathlib.Path) -> CheckpointError:
    return CheckpointError(f"{path} exists; name a new one")

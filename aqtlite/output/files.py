"""Atomic writing of files."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator

from aqtlite.errors import UnwritableError
from aqtlite.output.local_paths import check_local


def check_target(path: str | os.PathLike[str]) -> None:
    """Checks, before any work, that a path is one that `write` can replace.

    Raises:
        ValueError: if it is an address, a folder or a device, or a symbolic link,
            which `write` would replace, and leave the file that it points to.
    """
    check_local(path)
    there = pathlib.Path(path)
    if there.is_symlink():
        raise ValueError(f"{path} is a symbolic link; name what it points to")
    if there.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    if there.exists() and not there.is_file():
        raise ValueError(f"{path} is a device or a pipe; name a file")


def write(data: bytes, path: str | os.PathLike[str]) -> None:
    """Writes a file atomically; replaces an existing file.

    Of several that write one path at a time, the last one's file stays.

    Args:
        data: contents of the file.
        path: path of the file, as `check_target` takes it.

    Raises:
        UnwritableError: if the file cannot be written; one that existed is left
            unchanged.
    """
    # Unlike a process id, the name is no other thread's, and no other host's on a
    # shared volume. It is created here, not by `tempfile`, for the mode of any file.
    temporary = pathlib.Path(path).with_name(f".aqtlite-{secrets.token_hex(8)}")
    with writing(path):
        file = temporary.open("xb")
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names a path in the errors of writing it, in place of a temporary file or none.

    Raises:
        UnwritableError: if an OSError is raised.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UnwritableError(error.errno, why, os.fspath(path)) from error

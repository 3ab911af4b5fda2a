"""Files of this folder, in folders that are made for them."""

import contextlib
import errno
import os
import pathlib
import tempfile
from collections.abc import Iterator

from aqtlite.errors import UnwritableError
from aqtlite.output import files

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}
"""Errors of files that cannot be written."""


@contextlib.contextmanager
def making(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names a file in the errors of the temporary ones that it is made and checked by.

    Args:
        path: path of the file.

    Raises:
        UnwritableError: if a temporary file cannot be written.
    """
    folder = tempfile.gettempdir()
    try:
        yield
    except OSError as error:
        # Errors of writing have no path.
        place = folder if error.filename is None else error.filename
        is_temporary = pathlib.Path(os.fsdecode(place)).is_relative_to(folder)
        if error.errno not in _NO_ROOM or not is_temporary:
            raise
        why = (
            f"{error.strerror or error} (a temporary file in {folder}; TMPDIR names "
            "another folder)"
        )
        raise UnwritableError(error.errno, why, os.fspath(path)) from error


def publish(data: bytes, path: str | os.PathLike[str]) -> None:
    """Writes a file atomically; replaces an existing file, and creates parent folders.

    Args:
        data: contents of the file.
        path: path of the file, as `files.check_target` takes it.

    Raises:
        OSError: if the file cannot be written; one that existed is left unchanged.
    """
    with files.writing(path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    files.write(data, path)

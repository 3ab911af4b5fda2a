"""Files of this folder, in folders that are made for them."""

import os
import pathlib

from aqtlite.output import files


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

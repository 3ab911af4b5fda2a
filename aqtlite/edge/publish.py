"""Atomic writing of files."""

import os
import pathlib


def publish(data: bytes, path: pathlib.Path) -> None:
    """Writes a file atomically; replaces an existing file, and creates parent folders.

    Args:
        data: contents of the file.
        path: path of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

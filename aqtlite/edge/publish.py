"""Atomic writing of files."""

import os
import pathlib
import secrets

from aqtlite.output.local_paths import check_local


def check_target(path: str | os.PathLike[str]) -> None:
    """Checks, before any work, that a path is one that `publish` can write.

    Raises:
        ValueError: if it is an address, or a symbolic link, which `publish` would
            replace, and leave the file that it points to.
    """
    check_local(path)
    if pathlib.Path(path).is_symlink():
        raise ValueError(f"{path} is a symbolic link; name what it points to")


def publish(data: bytes, path: pathlib.Path) -> None:
    """Writes a file atomically; replaces an existing file, and creates parent folders.

    Of several that write one path at a time, the last one's file stays.

    Args:
        data: contents of the file.
        path: path of the file, as `check_target` takes it.

    Raises:
        OSError: if the file cannot be written; one that existed is left unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unlike a process id, the name is no other thread's, and no other host's on a
    # shared volume. It is created here, not by `tempfile`, for the mode of any file.
    temporary = path.with_name(f".aqtlite-{secrets.token_hex(8)}")
    file = temporary.open("xb")
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

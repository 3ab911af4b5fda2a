"""The staging folder: quantized weights on disk, so that a conversion can be resumed.

A weight is stored as one file of bytes for each array and a JSON record of their
checksums, which is written last.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable
from typing import IO, NamedTuple

import numpy as np

from aqtlite.checkpoint import one_process
from aqtlite.checkpoint.arrays import ArrayInfo, as_bytes, checksum
from aqtlite.checkpoint.errors import CheckpointError

_ATTEMPTS = 100  # at locking a folder that other conversions keep removing


class Finished(NamedTuple):
    """The record of a staged weight."""

    checksums: dict[str, int]  # by field: "qvalue", "scale", ...
    decibels: float | None


class Staging:
    """A folder beside the target, locked by the conversion that uses it."""

    def __init__(self, folder: pathlib.Path):
        """Creates the folder if it does not exist, and locks it until `close`.

        Args:
            folder: path of the folder.

        Raises:
            CheckpointError: if another conversion has locked the folder, or if it was
                not created by a conversion.
        """
        self.folder = folder
        self._key = folder / "key"
        _check(folder)
        self._lock = _locked(folder)
        if self._contents() and not self._has_key():
            self._lock.close()
            raise CheckpointError(f"{folder} is in the way; move it")

    def claim(self, key: str) -> None:
        """Empties the folder, unless a conversion with the same key left it.

        Args:
            key: hexadecimal hash of the source and of everything that its conversion
                depends on.
        """
        if not self._key.exists() or self._key.read_text() != key:
            for entry in self._contents():
                remove(entry)
            write_file(self._key, key.encode())

    def close(self) -> None:
        """Unlocks the folder, and leaves the staged weights in it."""
        if self._lock.closed:
            return
        if self.folder.exists() and os.listdir(self.folder) == ["lock"]:
            (self.folder / "lock").unlink()
            # Another process may have created its lock in the meantime.
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        self._lock.close()

    def discard(self) -> None:
        """Removes the folder."""
        for entry in self._contents():
            remove(entry)
        self._key.unlink(missing_ok=True)
        self.close()

    def _contents(self) -> list[pathlib.Path]:
        entries = self.folder.iterdir()
        return [entry for entry in entries if entry.name not in ("lock", "key")]

    def _has_key(self) -> bool:
        """Whether the folder has a key, or the beginning of an interrupted write."""
        try:
            return re.fullmatch("[0-9a-f]{0,64}", self._key.read_text()) is not None
        except (FileNotFoundError, UnicodeDecodeError):
            return False

    def finished(self, index: int, fields: Iterable[str]) -> Finished | None:
        """Reads the record of a weight; None if an array is missing or damaged."""
        record = self.folder / f"{index}.json"
        if not record.exists():
            return None
        try:
            finished = Finished(**json.loads(record.read_text()))
            for field in fields:
                found = np.fromfile(self.folder / f"{index}.{field}", np.uint8)
                if checksum(found) != finished.checksums[field]:
                    return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            # The machine stopped before everything had reached the disk.
            return None
        return finished

    def put(
        self, index: int, arrays: dict[str, np.ndarray], decibels: float | None
    ) -> Finished:
        """Stages a weight."""
        for field, x in arrays.items():
            write_file(self.folder / f"{index}.{field}", as_bytes(x))
        checksums = {field: checksum(x) for field, x in arrays.items()}
        finished = Finished(checksums, decibels)
        record = self.folder / f"{index}.record"
        write_file(record, json.dumps(finished._asdict()).encode())
        record.rename(self.folder / f"{index}.json")
        return finished

    def get(self, index: int, field: str, info: ArrayInfo) -> np.ndarray:
        """Reads an array of a staged weight."""
        data = np.fromfile(self.folder / f"{index}.{field}", np.uint8)
        return data.view(info.dtype).reshape(info.shape)


def _check(folder: pathlib.Path) -> None:
    """Checks that a conversion made the folder, before anything is written to it."""
    entries: list[pathlib.Path] = []
    if folder.is_dir():
        with contextlib.suppress(FileNotFoundError):  # It may just have been removed.
            entries = list(folder.iterdir())
    for path in (folder, *entries):
        if path.is_symlink():
            raise CheckpointError(f"{path} is in the way, a symbolic link; move it")
    # A conversion creates the lock first, and removes it last.
    if entries and "lock" not in {entry.name for entry in entries}:
        raise CheckpointError(f"{folder} is in the way; move it")


def _locked(folder: pathlib.Path) -> IO[bytes]:
    """Locks the folder by a file in it; creates both if they do not exist."""
    path = folder / "lock"
    for left in reversed(range(_ATTEMPTS)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except (FileNotFoundError, FileExistsError) as error:
            if folder.exists() and not folder.is_dir():
                raise
            if not left:  # A link to nowhere is on the way, say.
                raise CheckpointError(f"{folder} cannot be made: {error}") from error
            continue  # Another conversion has just finished and removed the folder.
        lock = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            break
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        lock.close()  # The file was removed before it was locked: it locks nothing.
    raise CheckpointError(
        f"another conversion is writing to {folder}; wait for it, or stop it"
        + one_process.advice()
    )


def write_file(path: pathlib.Path, data: bytes | memoryview) -> None:
    """Writes a new file: links are replaced, not followed."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)


def sync_tree(path: pathlib.Path) -> None:
    """Flushes a file, or a folder and everything below it, to disk."""
    for entry in path.rglob("*") if path.is_dir() else ():
        sync(entry)
    sync(path)


def sync(path: pathlib.Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: pathlib.Path) -> None:
    """Removes a file, or a folder and everything below it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

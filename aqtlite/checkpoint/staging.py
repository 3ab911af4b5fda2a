"""Finished weights on disk, so that an interrupted conversion goes on where it was.

A weight is two files of bytes and, written last, a record in JSON with their checksums.
"""

import fcntl
import json
import os
import pathlib
import shutil
from typing import IO, NamedTuple

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo, as_bytes, checksum
from aqtlite.checkpoint.errors import CheckpointError


class Finished(NamedTuple):
    """A weight that lies ready."""

    checksums: dict[str, int]  # of "qvalue" and "scale"
    decibels: float | None


class Staging:
    """A folder beside the target, for one conversion of one source."""

    def __init__(self, folder: pathlib.Path, key: str):
        """Opens the folder, empty unless it was left by the same conversion.

        Args:
            folder: where; it is made if it is not there.
            key: what identifies the source and all that its conversion depends on.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        key_file = folder / "key"
        # Without a key there is no more than a lock, unless it is somebody else's.
        if not key_file.exists() and {f.name for f in folder.iterdir()} - {"lock"}:
            raise CheckpointError(f"{folder} is in the way; move it")
        self._lock = _locked(folder)
        if not key_file.exists() or key_file.read_text() != key:
            for entry in folder.iterdir():
                if entry.name not in ("lock", "key"):
                    remove(entry)
            write_file(key_file, key.encode())

    def close(self) -> None:
        """Lets go of the folder, and leaves it for another time."""
        self._lock.close()

    def discard(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder)
        self.close()

    def finished(self, index: int) -> Finished | None:
        """What is known of a weight that lies ready, and whole."""
        record = self.folder / f"{index}.json"
        if not record.exists():
            return None
        try:
            finished = Finished(**json.loads(record.read_text()))
            for field, wanted in finished.checksums.items():
                found = np.fromfile(self.folder / f"{index}.{field}", np.uint8)
                if checksum(found) != wanted:
                    return None
        except (OSError, ValueError, TypeError):
            # The machine stopped before the disk had all of it.
            return None
        return finished

    def put(
        self, index: int, arrays: dict[str, np.ndarray], decibels: float | None
    ) -> Finished:
        """Keeps a weight."""
        for field, x in arrays.items():
            write_file(self.folder / f"{index}.{field}", as_bytes(x))
        checksums = {field: checksum(x) for field, x in arrays.items()}
        finished = Finished(checksums, decibels)
        record = self.folder / f"{index}.record"
        write_file(record, json.dumps(finished._asdict()).encode())
        record.rename(self.folder / f"{index}.json")
        return finished

    def get(self, index: int, field: str, info: ArrayInfo) -> np.ndarray:
        """Reads an array of a weight that lies ready."""
        data = np.fromfile(self.folder / f"{index}.{field}", np.uint8)
        return data.view(info.dtype).reshape(info.shape)


def _locked(folder: pathlib.Path) -> IO[bytes]:
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise CheckpointError(
            f"another conversion is writing to {folder}; wait for it, or stop it"
        ) from error
    return lock


def write_file(path: pathlib.Path, data: bytes | memoryview) -> None:
    """Writes a file."""
    with path.open("wb") as file:
        file.write(data)


def sync_tree(path: pathlib.Path) -> None:
    """Waits until the disk has a file, or a folder and all that is below it."""
    for entry in path.rglob("*") if path.is_dir() else ():
        sync(entry)
    sync(path)


def sync(path: pathlib.Path) -> None:
    """Waits until the disk has a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: pathlib.Path) -> None:
    """Removes a file, or a folder and all that is below it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()

"""Selection of a checkpoint's format by its path."""

import os
import pathlib

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import msgpack, orbax, safetensors
from aqtlite.checkpoint.formats.base import Reader, Writer
from aqtlite.output.local_paths import check_local


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path; raises CheckpointError for an address such as ``gs://bucket``."""
    try:
        check_local(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return pathlib.Path(path)


def open_reader(path: pathlib.Path) -> Reader:
    """Opens a checkpoint for reading.

    Raises:
        CheckpointError: if there is no checkpoint.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _open(path: pathlib.Path) -> Reader:
    if not local_path(path).exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir():
        if safetensors.files_in(path):
            return safetensors.SafetensorsReader(path)
        return orbax.OrbaxReader(path)
    if path.suffix == safetensors.SUFFIX:
        return safetensors.SafetensorsReader(path)
    if path.suffix == msgpack.SUFFIX:
        return msgpack.MsgpackReader(path)
    raise CheckpointError(
        f"{path} is neither a folder (Orbax), nor a file that ends in "
        f"{safetensors.SUFFIX} or {msgpack.SUFFIX}, nor a GGUF file"
    )


def writer_for(path: pathlib.Path) -> Writer:
    """Selects a writer by suffix: safetensors, or Orbax without a suffix.

    Raises:
        CheckpointError: if none writes to such a path.
    """
    if path.suffix == msgpack.SUFFIX:
        raise CheckpointError(
            f"{path}: msgpack files are read, not written; name a folder (Orbax) or a "
            f"file that ends in {safetensors.SUFFIX}"
        )
    if path.suffix == safetensors.SUFFIX:
        return safetensors.SafetensorsWriter()
    if "\\" in str(path.absolute()):
        raise CheckpointError(
            f"{path}: Orbax takes a backslash for a separator of folders; name another "
            f"folder, or a file that ends in {safetensors.SUFFIX}"
        )
    return orbax.OrbaxWriter()

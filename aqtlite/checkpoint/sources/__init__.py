"""Checkpoints as they are read: Orbax, safetensors, msgpack."""

import pathlib

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.sources import msgpack, orbax, safetensors
from aqtlite.checkpoint.sources.base import Source

__all__ = ["Source", "open_source"]


def open_source(path: pathlib.Path) -> Source:
    """Opens a checkpoint for reading, whatever its format.

    Raises:
        CheckpointError: if there is none.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _open(path: pathlib.Path) -> Source:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir():
        if safetensors.files_in(path):
            return safetensors.Safetensors(path)
        return orbax.Orbax(path)
    if path.suffix == safetensors.SUFFIX:
        return safetensors.Safetensors(path)
    if path.suffix == msgpack.SUFFIX:
        return msgpack.Msgpack(path)
    raise CheckpointError(
        f"{path} is neither a folder (Orbax) nor a file that ends in "
        f"{safetensors.SUFFIX} or {msgpack.SUFFIX}"
    )

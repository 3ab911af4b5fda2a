"""Checkpoints as they are written: Orbax, safetensors."""

import pathlib

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.sources.msgpack import SUFFIX as MSGPACK
from aqtlite.checkpoint.sources.safetensors import SUFFIX as SAFETENSORS
from aqtlite.checkpoint.targets import orbax, safetensors
from aqtlite.checkpoint.targets.base import Target

__all__ = ["Target", "target_for"]


def target_for(path: pathlib.Path) -> Target:
    """How to write a checkpoint of that name: safetensors by its ending, else Orbax."""
    if path.suffix == MSGPACK:
        raise CheckpointError(
            f"{path}: msgpack files are read, not written; name a folder (Orbax) or a "
            f"file that ends in {SAFETENSORS}"
        )
    return safetensors.Safetensors() if path.suffix == SAFETENSORS else orbax.Orbax()

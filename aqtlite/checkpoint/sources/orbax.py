"""Orbax checkpoints, the format of Flax users."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from aqtlite.checkpoint.arrays import ArrayInfo, path_name
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.sources import base

MANIFEST = "aqtlite.json"


class Orbax(base.Source):
    """A folder that Orbax wrote, or a step of an `orbax` checkpoint manager."""

    def __init__(self, path: pathlib.Path):
        item = path / "default"
        self.path = path if (path / "_METADATA").exists() else item
        if not (self.path / "_METADATA").exists():
            raise CheckpointError(
                f"{path} is not an Orbax checkpoint: it has no _METADATA. Name the "
                "folder that Orbax's save was given, or a step of it"
            )

    @functools.cached_property
    def _checkpointer(self) -> Any:
        return ocp.PyTreeCheckpointer()

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        try:
            metadata = self._checkpointer.metadata(self.path.resolve())
            tree = metadata.item_metadata.tree
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {
            path_name(path): ArrayInfo(tuple(leaf.shape), np.dtype(leaf.dtype))
            for path, leaf in leaves
            if getattr(leaf, "shape", None) is not None
        }

    def read(self, name: str) -> np.ndarray:
        return self._restore(name, ocp.RestoreArgs(restore_type=np.ndarray))

    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        return self._restore(name, ocp.ArrayRestoreArgs(sharding=sharding))

    def _restore(self, name: str, restore_args: Any) -> Any:
        item: Any = 0
        for step in reversed(name.split("/")):
            item, restore_args = {step: item}, {step: restore_args}
        args = ocp.args.PyTreeRestore(
            item=item, restore_args=restore_args, partial_restore=True
        )
        try:
            restored = self._checkpointer.restore(self.path.resolve(), args=args)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"{name} cannot be read from {self.path}: {error}"
            ) from error
        for step in name.split("/"):
            restored = restored[step]
        return restored

    def manifest(self) -> str | None:
        file = self.path / MANIFEST
        try:
            return file.read_text(encoding="utf-8") if file.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def files(self) -> list[pathlib.Path]:
        return sorted(file for file in self.path.rglob("*") if file.is_file())

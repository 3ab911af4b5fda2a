"""Orbax checkpoints, the format of Flax users."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.constants import Constant
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.names import path_name, steps_of
from aqtlite.checkpoint.sources import base

MANIFEST = "aqtlite.json"

_HARMLESS = 1 << 32  # bytes, that any machine which converts can hold
_RATIO = 1 << 16
"""More than that, zstd compresses nothing: of 128 KiB it keeps 4 bytes."""
_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OSError,
    RecursionError,
)


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
    def _leaves(self) -> dict[str, Any]:
        """The metadata of each leaf."""
        try:
            metadata = self._checkpointer.metadata(self.path.resolve())
            tree = metadata.item_metadata.tree
        except _ERRORS as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        leaves: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda x: x is None
        )[0]:
            name = path_name(path)
            if not all(isinstance(key, jax.tree_util.DictKey) for key in path):
                raise CheckpointError(
                    f"{name} in {self.path} lies in a list or a tuple, and only trees "
                    "of dictionaries are converted; save the parameters alone"
                )
            leaves[name] = leaf
        return leaves

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        infos = {
            name: ArrayInfo(tuple(leaf.shape), np.dtype(leaf.dtype))
            for name, leaf in self._leaves.items()
            if getattr(leaf, "shape", None) is not None
        }
        declared = sum(info.nbytes for info in infos.values())
        held = sum(file.stat().st_size for file in self.files())
        # What cannot be allocated would end the process, not raise.
        if declared > max(_HARMLESS, _RATIO * held):
            raise CheckpointError(
                f"{self.path} says that it holds {declared / 1e9:.0f} GB, in files of "
                f"{held} bytes: its metadata is damaged"
            )
        return infos

    @functools.cached_property
    def values(self) -> Mapping[str, Constant]:
        names = self._leaves.keys() - self.arrays.keys()
        return {name: self._value(name) for name in sorted(names)}

    def _value(self, name: str) -> Constant:
        if self._leaves[name] is None:
            return None
        value = self._restore(name, ocp.RestoreArgs())
        if not isinstance(value, str):
            raise CheckpointError(
                f"{name} in {self.path} is neither an array, a number, a string nor "
                f"None but a {type(value).__name__}"
            )
        return value

    def read(self, name: str) -> np.ndarray:
        return self._restore(name, ocp.RestoreArgs(restore_type=np.ndarray))

    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        return self._restore(name, ocp.ArrayRestoreArgs(sharding=sharding))

    def _restore(self, name: str, restore_args: Any) -> Any:
        item: Any = 0
        steps = steps_of(name)
        for step in reversed(steps):
            item, restore_args = {step: item}, {step: restore_args}
        args = ocp.args.PyTreeRestore(
            item=item, restore_args=restore_args, partial_restore=True
        )
        try:
            restored = self._checkpointer.restore(self.path.resolve(), args=args)
        except _ERRORS as error:
            raise CheckpointError(
                f"{name} cannot be read from {self.path}: {error}"
            ) from error
        for step in steps:
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

"""The Orbax format."""

import contextlib
import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import base
from aqtlite.checkpoint.names import name_of, path_name, steps_of

_MANIFEST = "aqtlite.json"
_METADATA = "_METADATA"
_COMPOSITE = "_CHECKPOINT_METADATA"
_DEFAULT = "default"
"""Name of the single item that a checkpoint manager saves if it is given no names."""

_HARMLESS = 1 << 32  # bytes
_RATIO = 1 << 16
"""Bound of the compression ratio of zstd, which stores 128 KiB in at least 4 bytes."""
_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OSError,
    RecursionError,
)
_LONGEST = 200  # bytes of a file name; most file systems allow 255

_OWN = {
    _MANIFEST,
    _COMPOSITE,
    _METADATA,
    "_sharding",
    "_strings.json",
    "array_metadatas",
    "commit_success.txt",
}
"""Entries of the folder other than arrays."""

_NOISE = (
    "Skipping merge of OCDBT",  # This writer does not use OCDBT.
    "Metadata file does not exist",  # Logged for items of composite checkpoints.
)
"""Parts of the text of harmless Orbax warnings."""


class OrbaxReader(base.Reader):
    """Reads a folder that Orbax wrote, or a step of a checkpoint manager.

    In a composite checkpoint, items are the first step of names.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._items: dict[tuple[str, ...], pathlib.Path] = {}
        if (path / _METADATA).exists():
            self._items = {(): path}
            return
        self._items = {
            (folder.name,): folder
            for folder in sorted(path.iterdir())
            if (folder / _METADATA).exists() and (path / _COMPOSITE).exists()
        }
        default = path / _DEFAULT
        if (default / _METADATA).exists() and self._items.keys() <= {(_DEFAULT,)}:
            self.path = default
            self._items = {(): default}
        if not self._items:
            raise CheckpointError(
                f"{path} is not an Orbax checkpoint: it has no {_METADATA}. Name the "
                "folder that Orbax's save was given, or a step of it"
            )

    @functools.cached_property
    def _checkpointer(self) -> Any:
        alone = _alone()
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        return ocp.Checkpointer(handler, multiprocessing_options=alone)

    @functools.cached_property
    def _leaves(self) -> dict[str, tuple[bool, Any]]:
        """By leaf name: whether all levels above are dictionaries, and the metadata."""
        leaves: dict[str, tuple[bool, Any]] = {}
        for item, folder in self._items.items():
            try:
                with _quiet():
                    metadata = self._checkpointer.metadata(folder.resolve())
            except _ERRORS as error:
                raise CheckpointError(f"{folder} cannot be read: {error}") from error
            if metadata.item_metadata is None:
                raise CheckpointError(
                    f"{folder} cannot be read: its metadata (_METADATA, or that of an "
                    "array) is missing or damaged"
                )
            tree = metadata.item_metadata.tree
            for path, leaf in jax.tree.leaves_with_path(tree):
                name = "/".join(filter(None, (name_of(item), path_name(path))))
                in_dicts = all(isinstance(k, jax.tree_util.DictKey) for k in path)
                leaves[name] = in_dicts, leaf
        return leaves

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        infos = {
            name: _info(leaf)
            for name, (in_dicts, leaf) in self._leaves.items()
            if in_dicts and _is_array(leaf)
        }
        declared = sum(info.nbytes for info in infos.values())
        try:
            held = sum(file.stat().st_size for file in self.files())
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        # Allocating that much would kill the process instead of raising.
        if declared > max(_HARMLESS, _RATIO * held):
            raise CheckpointError(
                f"{self.path} says that it holds {declared / 1e9:.0f} GB, in files of "
                f"{held} bytes: its metadata is damaged"
            )
        return infos

    @property
    def others(self) -> Mapping[str, str]:
        return {
            name: _description(leaf) + ("" if in_dicts else " in a list or a tuple")
            for name, (in_dicts, leaf) in self._leaves.items()
            if name not in self.arrays
        }

    def read(self, name: str) -> np.ndarray:
        steps = steps_of(name)
        item = () if () in self._items else steps[:1]
        below = steps[len(item) :]
        tree: Any = 0
        restore_args: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for step in reversed(below):
            tree, restore_args = {step: tree}, {step: restore_args}
        args = ocp.args.PyTreeRestore(
            item=tree, restore_args=restore_args, partial_restore=True
        )
        try:
            with _quiet():
                folder = self._items[item].resolve()
                restored = self._checkpointer.restore(folder, args=args)
        except _ERRORS as error:
            raise CheckpointError(
                f"{name} cannot be read from {self.path}: {error}"
            ) from error
        for step in below:
            restored = restored[step]
        return restored

    def manifest(self) -> str | None:
        file = self.path / _MANIFEST
        try:
            return file.read_text(encoding="utf-8") if file.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def files(self) -> list[pathlib.Path]:
        return sorted(file for file in self.path.rglob("*") if file.is_file())


def _is_array(leaf: Any) -> bool:
    return getattr(leaf, "shape", None) is not None


def _info(leaf: Any) -> ArrayInfo:
    return ArrayInfo(tuple(leaf.shape), np.dtype(leaf.dtype))


def _description(leaf: Any) -> str:
    if _is_array(leaf):
        return str(_info(leaf))
    return f"a {type(leaf).__name__.removesuffix('Metadata').lower()}"


class OrbaxWriter(base.Writer):
    """Writes a folder, as `orbax.checkpoint.PyTreeCheckpointer` does."""

    def check(self, arrays: Mapping[str, ArrayInfo]) -> None:
        if own := jax.process_index():
            raise CheckpointError(
                f"this is process {own} of a program, and Orbax writes a folder in "
                "process 0: convert there, while the others wait, or name a target "
                "that ends in .safetensors"
            )
        for name, info in arrays.items():
            if 0 in info.shape:
                raise CheckpointError(
                    f"Orbax cannot hold {name}, {info}, which is empty; "
                    "name a target that ends in .safetensors"
                )
            file_name = _file_name(name)
            if max(len(part.encode()) for part in file_name.split("/")) > _LONGEST:
                raise CheckpointError(
                    f"{name} is too long a name for a file; name a target that ends "
                    "in .safetensors"
                )
            if "\\" in name or any(
                part.endswith(".__lock") for part in file_name.split("/")
            ):
                raise CheckpointError(
                    f"Orbax cannot write {name}: no step may hold a backslash or end "
                    "in '.__lock'; name a target that ends in .safetensors"
                )
            if file_name.split("/")[0] in _OWN:
                raise CheckpointError(
                    f"Orbax keeps its own metadata in {file_name.split('/')[0]}, where "
                    f"{name} would lie; rename it"
                )
        files = sorted((_file_name(name).split("/"), name) for name in arrays)
        for (file, name), (other, other_name) in itertools.pairwise(files):
            if other[: len(file)] == file:
                raise CheckpointError(
                    f"Orbax would write {name!r} and {other_name!r} to one place, "
                    f"{'/'.join(file)}; rename one of them"
                )

    def owns(self, path: pathlib.Path, names: Iterable[str]) -> bool:
        files = {_file_name(name).split("/")[0] for name in names}
        return (
            path.is_dir() and {entry.name for entry in path.iterdir()} <= files | _OWN
        )

    def write(
        self,
        path: pathlib.Path,
        arrays: Sequence[LazyArray],
        manifest: Callable[[], str],
    ) -> None:
        tree = traverse_util.unflatten_dict({steps_of(a.name): a for a in arrays})
        registry = ocp.type_handlers.create_type_handler_registry(
            (LazyArray, _LazyArrayHandler()),
            (jax.Array, ocp.type_handlers.ArrayHandler()),
        )
        # OCDBT would write its index again after every array.
        alone = _alone()
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False,
            type_handler_registry=registry,
            multiprocessing_options=alone,
        )
        with (
            _quiet(),
            ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer,
        ):
            checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(tree))
        # A file system that folds case or Unicode may merge two names into one folder.
        folders = {
            file.parent.relative_to(path).as_posix() for file in path.rglob(".zarray")
        }
        for array in arrays:
            if _file_name(array.name) not in folders:
                raise CheckpointError(
                    f"{array.name} was not written to {path}: does the file system "
                    "tell its name from that of another array?"
                )
        if text := manifest():
            (path / _MANIFEST).write_text(text, encoding="utf-8")


class _LazyArrayHandler(ocp.type_handlers.NumpyHandler):
    """Reads, writes and releases one array at a time."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.read()], [info], [arg]):
                written.result()
        return []


def _alone() -> ocp.options.MultiprocessingOptions:
    """Options for a process that does not wait for the others of its program."""
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own,
        active_processes={own},
        barrier_sync_key_prefix=f"aqtlite{own}",
    )


def _file_name(name: str) -> str:
    """Name of the folder of an array."""
    return ".".join(steps_of(name))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the warnings in `_NOISE`."""

    # A new filter for each call, since several threads may be inside at once.
    def is_no_noise(record: logging.LogRecord) -> bool:
        return not any(noise in str(record.msg) for noise in _NOISE)

    logger = absl.logging.get_absl_logger()
    logger.addFilter(is_no_noise)
    try:
        yield
    finally:
        logger.removeFilter(is_no_noise)

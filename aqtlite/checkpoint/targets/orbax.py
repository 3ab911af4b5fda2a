"""Orbax checkpoints, written without holding all arrays in memory."""

import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from aqtlite.checkpoint.arrays import LazyArray
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import Stored
from aqtlite.checkpoint.names import steps_of
from aqtlite.checkpoint.sources.orbax import MANIFEST
from aqtlite.checkpoint.targets import base

_LONGEST = 200  # bytes of a file's name, of the 255 that most file systems allow

_OWN = {
    MANIFEST,
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "_sharding",
    "_strings.json",
    "array_metadatas",
    "commit_success.txt",
}
"""What lies in the folder beside the arrays."""


def _file_name(name: str) -> str:
    """The folder in which Orbax writes an array."""
    return ".".join(steps_of(name))


class Orbax(base.Target):
    """A folder, as `orbax.checkpoint.PyTreeCheckpointer` writes it."""

    def check(self, arrays: Mapping[str, Stored]) -> None:
        for name, stored in arrays.items():
            if 0 in stored.info.shape:
                raise CheckpointError(
                    f"Orbax cannot hold {name}, {stored.info}, which is empty; "
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
        # Not OCDBT, which writes its index again after every array.
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(tree))
        # A file system that takes two names for one would keep the last array alone.
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
            (path / MANIFEST).write_text(text, encoding="utf-8")


class _LazyArrayHandler(ocp.type_handlers.NumpyHandler):
    """Reads an array, writes it and forgets it, before it reads the next."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.read()], [info], [arg]):
                written.result()
        return []

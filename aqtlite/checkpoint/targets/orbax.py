"""Orbax checkpoints, written without holding all arrays in memory."""

import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from aqtlite.checkpoint.arrays import LazyArray
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import Stored
from aqtlite.checkpoint.sources.orbax import MANIFEST
from aqtlite.checkpoint.targets import base


class Orbax(base.Target):
    """A folder, as `orbax.checkpoint.PyTreeCheckpointer` writes it."""

    def check(self, arrays: Mapping[str, Stored]) -> None:
        for name, stored in arrays.items():
            if 0 in stored.info.shape:
                raise CheckpointError(
                    f"Orbax cannot hold {name}, {stored.info}, which is empty; "
                    "name a target that ends in .safetensors"
                )
            if len(name) > 200:
                raise CheckpointError(
                    f"{name} is too long a name for a file; name a target that ends "
                    "in .safetensors"
                )

    def write(
        self,
        path: pathlib.Path,
        arrays: Sequence[LazyArray],
        manifest: Callable[[], str],
    ) -> None:
        named = {array.name: array for array in arrays}
        tree = traverse_util.unflatten_dict(named, sep="/")
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
        if text := manifest():
            (path / MANIFEST).write_text(text)


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

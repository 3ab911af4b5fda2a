"""Loading of serving variables from a converted checkpoint."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util

from aqtlite.checkpoint import manifest_json, replacement
from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.arrays import checksum
from aqtlite.checkpoint.compatibility import abstract_serving
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader, open_reader
from aqtlite.checkpoint.load_float import variables_of
from aqtlite.checkpoint.manifest import (
    DOUBLE_SCALES,
    NNX,
    Frozen,
    Manifest,
    Node,
    Plain,
    Stored,
)
from aqtlite.checkpoint.names import steps_of
from aqtlite.checkpoint.report import Report, report_of, size_of
from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.program.serving.placeholder import with_zeros
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import double_scales


def load_serving(
    path: str | os.PathLike,
    model: Model | nnx.Module | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Any = None,
) -> Any:
    """Loads what `convert_checkpoint` or `aqtlite convert` wrote.

    Packed integers are unpacked to the dtypes that `aqtlite.flax.convert` gives. Each
    array is verified against its stored checksum; on a mesh of several hosts, which
    read slices, only sizes and dtypes are verified. Statistics of static ranges are
    stored as gathered; with a model, they are turned into the scales that
    `aqtlite.flax.convert` computes from them.

    Args:
        path: path of the checkpoint.
        model: the model that will serve. It is traced with the shapes of the
            conversion's sample inputs, and has to freeze the same weights as the
            converted model, with the same shapes and configs. Partitioning metadata
            (`nn.Partitioned`) then comes from the model, whether or not the source had
            any. None loads a Linen checkpoint as stored, without partitioning metadata.
            A checkpoint of an NNX model needs the model as it was before conversion,
            possibly abstract (`nnx.eval_shape`); it is not modified, and provides the
            rngs and caches that the checkpoint lacks.
        mesh: devices to load onto, by the model's own partitioning; a scale is sharded
            like its weight, except along axes with blocks. Each of several hosts reads
            the slices that its devices hold. None loads onto the default device.
        rules: logical axis rules, if the model's partitioning has logical names
            (`nn.with_logical_partitioning`). None takes the names as axes of the mesh.

    Returns:
        The serving variables; for an NNX model, a serving model, as
        `aqtlite.flax.nnx.convert` returns it.

    Raises:
        CheckpointError: if `path` is not a converted checkpoint, is damaged, is
            replaced while it is read, or does not fit this model or this version of
            aqtlite; the message names both sides.
    """
    path = pathlib.Path(path)
    with replacement.noticed(path):
        return _loaded(path, model, mesh, rules)


def _loaded(
    path: pathlib.Path,
    model: Model | nnx.Module | None,
    mesh: jax.sharding.Mesh | None,
    rules: Any,
) -> Any:
    source = open_reader(path)
    manifest = _manifest(source)
    if manifest.framework == NNX and not isinstance(model, nnx.Module):
        raise CheckpointError(
            f"{path} is of an NNX model, {manifest.model}: give load_serving the "
            f"model that was converted, not {model!r}"
        )
    if manifest.framework != NNX and not (model is None or isinstance(model, Model)):
        raise CheckpointError(f"model has to be a Linen module, got {_brief(model)}")
    if model is None:
        if mesh is not None:
            raise CheckpointError(
                "mesh= needs model=, whose partitioning says what lies where"
            )
        return _tree(source, manifest)
    if manifest.sample is None:
        raise CheckpointError(
            f"{path} was converted with inputs that its manifest cannot describe, so "
            "that a model cannot be compared with it: load it without one"
        )
    variables = variables_of(model, *sample_lib.decode(manifest.sample))
    serving, plan = abstract_serving(manifest, variables, str(path))
    shardings = {} if mesh is None else variables.shardings(serving, mesh, rules)
    loaded = variables.filled(
        serving,
        manifest.arrays,
        lambda name: _read(source, manifest, name, shardings),
        shardings,
    )
    return plan.model.fix_scales(loaded)


def _brief(model: Any) -> str:
    is_module = isinstance(model, nnx.Module)
    return f"the NNX module {type(model).__name__}" if is_module else repr(model)


def summarize(path: str | os.PathLike) -> Report:
    """Reports on a converted checkpoint, without reading its arrays.

    Raises:
        CheckpointError: if `path` is not a converted checkpoint, its manifest is
            damaged, or it is replaced while it is read.
    """
    path = pathlib.Path(path)
    with replacement.noticed(path):
        manifest = _manifest(open_reader(path))
        return report_of(manifest, bytes_on_disk=size_of(path))


def _manifest(source: Reader) -> Manifest:
    text = source.manifest()
    if text is None:
        raise CheckpointError(
            f"{source.path} is not a converted checkpoint: it has no manifest. "
            "'aqtlite convert' or aqtlite.checkpoint.convert_checkpoint makes one; "
            "serving variables that Orbax saved are restored by Orbax, with the "
            "abstract serving variables as target"
        )
    return manifest_json.from_json(text, str(source.path))


def _tree(source: Reader, manifest: Manifest) -> dict[str, Any]:
    """Assembles the serving variables from the manifest, without a model."""

    def value(path: str, node: Node) -> Any:
        match node:
            case Plain():
                return _read(source, manifest, node.array, {})
            case Frozen():
                fields: dict[str, Any] = {
                    field: _read(source, manifest, name, {})
                    for field, name in node.arrays.items()
                }
                if node.packed is not None:
                    panels = fields["qvalue"]
                    fields["qvalue"] = dataclasses.replace(node.packed, panels=panels)
                if "scale" not in fields:
                    inner = {
                        one.removeprefix("scale."): fields.pop(one)
                        for one in DOUBLE_SCALES
                    }
                    fields["scale"] = double_scales.stored(**inner)
                return QTensor(
                    **fields,
                    dtype=node.dtype,
                    order=node.order,
                    numerics=node.numerics,
                    padding=node.padding,
                )
            case FrozenKernel():
                _, *steps = steps_of(path)
                return with_zeros(dataclasses.replace(node, path="/".join(steps)))
            case _:
                return node

    values = {path: value(path, node) for path, node in manifest.nodes.items()}
    return given_variables.unfrozen(
        traverse_util.unflatten_dict(
            {steps_of(path): value for path, value in values.items()}
        )
    )


def _read(
    source: Reader,
    manifest: Manifest,
    name: str,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> jax.Array | np.ndarray:
    """Reads one array; checks its shape, dtype and checksum against the manifest."""
    stored = manifest.arrays[name]
    found = source.arrays.get(name)
    if found != stored.on_disk:
        raise CheckpointError(
            f"{name} in {source.path} is {found or 'missing'}; the manifest says "
            f"{stored.on_disk}"
        )
    info = stored.info
    sharding = shardings.get(name)
    # Without jax_enable_x64, JAX would truncate 64-bit arrays.
    fits = jax.dtypes.canonicalize_dtype(info.dtype) == info.dtype
    if sharding is not None and not fits:
        raise CheckpointError(
            f"{name} in {source.path} is {info}, which JAX cannot hold: enable "
            "jax_enable_x64"
        )
    if sharding is not None and not sharding.is_fully_addressable:
        return _read_slices(source, name, stored, sharding)
    raw = source.read(name)
    if checksum(raw) != stored.checksum:
        raise CheckpointError(
            f"{name} in {source.path} is damaged: its checksum is "
            f"{checksum(raw):08x}, and was {stored.checksum:08x} when it was written"
        )
    x = stored.packing.unpack(raw, info) if stored.packing else raw
    if sharding is not None:
        return jax.device_put(x, sharding)
    return jax.device_put(x, may_alias=False) if fits else x


def _read_slices(
    source: Reader, name: str, stored: Stored, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Reads the slices of one array that this host's devices hold."""
    slices = source.slices(name)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or ()
        if stored.packing:
            return stored.packing.unpack_slice(slices, stored.info, index)
        return slices[index]

    return jax.make_array_from_callback(stored.info.shape, sharding, read)

"""Serving variables from a converted checkpoint."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from aqtlite import config
from aqtlite.checkpoint import from_model
from aqtlite.checkpoint import manifest as manifest_lib
from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.arrays import ArrayInfo, checksum
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import Frozen, Manifest, Node, Plain, Value
from aqtlite.checkpoint.names import name_of, path_name, steps_of
from aqtlite.checkpoint.report import Report, report_of
from aqtlite.checkpoint.sources import Source, open_source
from aqtlite.flax.linen import convert as linen_convert
from aqtlite.flax.linen.call import Call
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.qtensor import QTensor
from aqtlite.serving.call_site import COLLECTION, CallSite


def load_serving(
    path: str | os.PathLike,
    model: nn.Module | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Any = None,
) -> Any:
    """Loads serving variables that `convert_checkpoint` or `aqtlite convert` wrote.

    Every array is compared with the checksum that was taken when it was written; on a
    mesh of several hosts, where none has a whole array, sizes and dtypes are.

    Args:
        path: the checkpoint.
        model: what will serve. It is traced with the shapes of the conversion's sample
            inputs, and has to freeze the same weights, of the same shapes and with the
            same configs, as the converted model. None takes the checkpoint as it is;
            partitioning metadata (`nn.Partitioned`) then is left out. With a model the
            metadata is the model's own, whether the source had it or not.
        mesh: the devices to load onto, by the model's own partitioning: a scale is
            sharded as its weight is. A host reads only what its devices hold. None
            loads onto the default device.
        rules: logical axis rules, where the names of the model's partitioning are
            logical (`nn.with_logical_partitioning`); None takes them for axes of the
            mesh.

    Returns:
        The serving variables.

    Raises:
        CheckpointError: if it is no converted checkpoint, is damaged, or is not of
            this model or of this version of aqtlite; it names both sides.
    """
    source = open_source(pathlib.Path(path))
    manifest = _manifest(source)
    if model is not None and not isinstance(model, nn.Module):
        raise CheckpointError(f"model has to be a Linen module, got {model!r}")
    if model is None:
        if mesh is not None:
            raise CheckpointError(
                "mesh= needs model=, whose partitioning says what lies where"
            )
        return _tree(source, manifest)
    serving = _abstract_serving(manifest, model, str(path))
    shardings = {} if mesh is None else _shardings(serving, mesh, rules)
    return jax.tree_util.tree_map_with_path(
        lambda key, _: _read(source, manifest, path_name(key), shardings), serving
    )


def _shardings(
    serving: Any, mesh: jax.sharding.Mesh, rules: Any
) -> dict[str, jax.sharding.Sharding]:
    """Where the model's own partitioning puts each array."""
    specs = nn.get_partition_spec(serving)
    if rules is not None:
        specs = nn.logical_to_mesh(specs, rules)
    tree = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )
    names = [
        path_name(key) for key, _ in jax.tree_util.tree_flatten_with_path(serving)[0]
    ]
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


def summarize(path: str | os.PathLike) -> Report:
    """What a converted checkpoint holds, without reading its arrays.

    Raises:
        CheckpointError: if it is no converted checkpoint, or its manifest is damaged.
    """
    return report_of(_manifest(open_source(pathlib.Path(path))), seconds=None)


def _manifest(source: Source) -> Manifest:
    text = source.manifest()
    if text is None:
        raise CheckpointError(
            f"{source.path} is not a converted checkpoint: it has no manifest. "
            "'aqtlite convert' or aqtlite.checkpoint.convert_checkpoint makes one"
        )
    return manifest_lib.from_json(text, str(source.path))


def _tree(source: Source, manifest: Manifest) -> dict[str, Any]:
    """The variables by the manifest alone."""

    def value(node: Node) -> Any:
        match node:
            case Plain():
                return _read(source, manifest, node.array, {})
            case Frozen():
                return QTensor(
                    qvalue=_read(source, manifest, node.qvalue, {}),
                    scale=_read(source, manifest, node.scale, {}),
                    dtype=node.dtype,
                    order=node.order,
                )
            case Value():
                return node.value
            case _:
                return node

    values = {path: value(node) for path, node in manifest.nodes.items()}
    return traverse_util.unflatten_dict(
        {steps_of(path): value for path, value in values.items()}
    )


def _read(
    source: Source,
    manifest: Manifest,
    name: str,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> jax.Array | np.ndarray:
    """One array, of the shape, dtype and checksum that the manifest says."""
    stored = manifest.arrays[name]
    found = source.arrays.get(name)
    is_int4 = stored.info.dtype == jnp.int4
    as_int8 = ArrayInfo(stored.info.shape, np.dtype("int8"))
    if found != stored.info and not (is_int4 and found == as_int8):
        raise CheckpointError(
            f"{name} in {source.path} is {found or 'missing'}; the manifest says "
            f"{stored.info}"
        )
    # JAX holds 64 bits only where it is told to; elsewhere it would cut them off.
    fits = jax.dtypes.canonicalize_dtype(stored.info.dtype) == stored.info.dtype
    x: jax.Array | np.ndarray
    if name in shardings:
        if not fits:
            raise CheckpointError(
                f"{name} in {source.path} is {stored.info}, which JAX cannot hold: "
                "enable jax_enable_x64"
            )
        x = source.read_sharded(name, shardings[name])
        x = x.astype(stored.info.dtype)
        host = np.asarray(x) if x.is_fully_addressable else None
    else:
        host = source.read(name).astype(stored.info.dtype, copy=False)
        x = jnp.asarray(host) if fits else host
    if host is not None and checksum(host) != stored.checksum:
        raise CheckpointError(
            f"{name} in {source.path} is damaged: its checksum is "
            f"{checksum(host):08x}, and was {stored.checksum:08x} when it was written"
        )
    return x


def _abstract_serving(manifest: Manifest, model: nn.Module, where: str) -> Any:
    """The serving variables that the model wants, as shapes; they fit the manifest."""
    if manifest.model is None:
        raise CheckpointError(
            f"{where} was converted by rules, without a model: load it without one"
        )
    if manifest.sample is None:
        raise CheckpointError(
            f"{where} was converted with inputs that its manifest cannot describe, so "
            "that a model cannot be compared with it: load it without one"
        )
    args, kwargs = sample_lib.decode(manifest.sample)
    frozen = {path for path, node in manifest.nodes.items() if isinstance(node, Frozen)}
    try:
        template = from_model.abstract_variables(model, args, kwargs)
        variables = _with_stored_dtypes(template, manifest)
        plan = linen_convert.plan(model, variables, [Call(*args, **kwargs)])
        paths = [weight.path for weight in plan.weights]
        serving, _ = plan.keep_float(
            [path for path in paths if name_of((COLLECTION, *path)) not in frozen]
        ).run()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is of another model, {_short(manifest.model)}: this one, "
            f"{_short(repr(model))}, fails with the sample inputs of the conversion: "
            f"{error}"
        ) from error
    nodes, arrays = from_model.describe(serving)
    differences = [
        _difference(path, manifest.nodes.get(path), nodes.get(path))
        for path in sorted({*manifest.nodes, *nodes})
    ] + [
        f"{name} is {manifest.arrays[name].info} in the checkpoint and "
        f"{arrays[name].info} in the model"
        for name in sorted({*manifest.arrays} & {*arrays})
        if manifest.arrays[name].info != arrays[name].info
    ]
    differences = [text for text in differences if text]
    if differences:
        raise CheckpointError(
            f"{where} is of another model than this one: {_few(differences)}"
        )
    return serving


def _with_stored_dtypes(template: Any, manifest: Manifest) -> Any:
    """The model's float variables, in the dtypes and collections of the source."""
    dtypes = {name: one.info.dtype for name, one in manifest.arrays.items()}
    for node in manifest.nodes.values():
        if isinstance(node, Frozen):
            dtypes.update({name: info.dtype for name, info in node.origin.items()})
    collections = {path.split("/")[0] for path in manifest.nodes}
    kept = {name: value for name, value in template.items() if name in collections}
    return jax.tree_util.tree_map_with_path(
        lambda key, leaf: jax.ShapeDtypeStruct(
            leaf.shape, dtypes.get(path_name(key), leaf.dtype)
        ),
        kept,
    )


def _difference(path: str, stored: Node | None, wanted: Node | None) -> str:
    """In what a node of the checkpoint differs from the model's, or nothing."""
    if stored is None or wanted is None:
        sides = ("the model", "the checkpoint")
        has, lacks = sides if stored is None else reversed(sides)
        return f"{has} has {path} and {lacks} has not"
    if isinstance(stored, CallSite) and isinstance(wanted, CallSite):
        changes = list(config.differences(stored.cfg, wanted.cfg))
        if changes:
            return f"the config of {path}, checkpoint against model: {_few(changes)}"
        changes = [
            f"{field.name} {getattr(stored, field.name)} against "
            f"{getattr(wanted, field.name)}"
            for field in dataclasses.fields(CallSite)
            if getattr(stored, field.name) != getattr(wanted, field.name)
            and field.name != "identity"
        ]
        return f"{path}, checkpoint against model: {_few(changes)}" if changes else ""
    if isinstance(stored, Frozen) and isinstance(wanted, Frozen):
        same = (stored.dtype, stored.order) == (wanted.dtype, wanted.order)
    elif isinstance(stored, FrozenKernel) and isinstance(wanted, FrozenKernel):
        # The number is the parameter's place among the others, which say themselves
        # where they differ.
        same = dataclasses.replace(stored, number=wanted.number) == wanted
    else:
        same = stored == wanted
    return (
        "" if same else f"{path} is {stored} in the checkpoint, {wanted} in the model"
    )


def _few(differences: list[str]) -> str:
    first, *others = differences
    return f"{first} (and {len(others)} more differences)" if others else first


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."

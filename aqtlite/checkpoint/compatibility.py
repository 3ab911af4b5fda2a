"""Comparing a converted checkpoint with the model that is to serve it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from aqtlite import config
from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import Frozen, Manifest, Node
from aqtlite.checkpoint.names import name_of, path_name
from aqtlite.checkpoint.nodes import describe
from aqtlite.checkpoint.variables import abstract_variables
from aqtlite.flax.call import Call
from aqtlite.flax.linen import convert as linen_convert
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.program.serving import conversion
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    IDENTITY,
    RECORD,
    FrozenRecord,
)
from aqtlite.program.serving.planning import Plan


def abstract_serving(manifest: Manifest, model: Model, where: str) -> tuple[Any, Plan]:
    """Plans the model's serving variables, and checks that a checkpoint holds them.

    Args:
        manifest: the manifest of the checkpoint.
        model: the model.
        where: the path of the checkpoint, for error messages.

    Returns:
        The serving variables as shapes, with statistics as they are stored, and the
        plan of the conversion that makes them.

    Raises:
        CheckpointError: if they differ, or if the manifest has no sample inputs.
    """
    if manifest.sample is None:
        raise CheckpointError(
            f"{where} was converted with inputs that its manifest cannot describe, so "
            "that a model cannot be compared with it: load it without one"
        )
    args, kwargs = sample_lib.decode(manifest.sample)
    frozen = frozen_paths(manifest)
    try:
        template = abstract_variables(model, args, kwargs)
        variables = _with_stored_dtypes(template, manifest)
        plan = linen_convert.plan(model, variables, [Call(*args, **kwargs)])
        paths = [weight.path for weight in plan.weights]
        floats = [one for one in paths if name_of((COLLECTION, *one)) not in frozen]
        serving = conversion.serving(plan.keep_float(floats))
    except (TypeError, ValueError) as error:
        raise another_model(where, manifest, repr(model), error) from error
    serving = _with_stored_values(serving, (), manifest)
    check(manifest, serving, where)
    return serving, plan


def _with_stored_values(node: Any, path: tuple[str, ...], manifest: Manifest) -> Any:
    """Leaves out the values of floats that a checkpoint does not have.

    Those that were converted earlier have fewer of them, or none.
    """
    if not isinstance(node, Mapping):
        return node
    found = {
        key: _with_stored_values(child, (*path, key), manifest)
        for key, child in node.items()
    }
    if isinstance(node.get(RECORD), FrozenRecord) and IDENTITY in node:
        stored = manifest.arrays.get(name_of((*path, IDENTITY)))
        if stored is not None:
            wanted = node[IDENTITY]
            rows = min(stored.info.shape[:1], wanted.shape[:1])
            shape = (*rows, *wanted.shape[1:])
            found[IDENTITY] = jax.ShapeDtypeStruct(shape, wanted.dtype)
        elif isinstance(node[RECORD].identity, str):
            del found[IDENTITY]
    return found


def check(manifest: Manifest, serving: Any, where: str) -> None:
    """Checks that a checkpoint holds serving variables.

    Args:
        manifest: manifest of the checkpoint.
        serving: the variables, as shapes.
        where: path of the checkpoint, for error messages.

    Raises:
        CheckpointError: naming the first difference.
    """
    nodes, arrays = describe(serving)
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


def frozen_paths(manifest: Manifest) -> set[str]:
    """The paths of the frozen weights of a checkpoint."""
    return {path for path, node in manifest.nodes.items() if isinstance(node, Frozen)}


def stored_dtypes(manifest: Manifest) -> dict[str, Any]:
    """The dtypes that the variables of the source had, by name."""
    dtypes = {name: one.info.dtype for name, one in manifest.arrays.items()}
    for node in manifest.nodes.values():
        if isinstance(node, Frozen):
            dtypes.update({name: info.dtype for name, info in node.origin.items()})
    return dtypes


def another_model(
    where: str, manifest: Manifest, model: str, error: Exception
) -> CheckpointError:
    """The error that a model cannot be traced as the one that was converted."""
    return CheckpointError(
        f"{where} is of another model, {_short(manifest.model)}: this one, "
        f"{_short(model)}, fails with the sample inputs of the conversion: {error}"
    )


def _with_stored_dtypes(template: Any, manifest: Manifest) -> Any:
    """Gives the model's float variables the dtypes and collections of the source."""
    dtypes = stored_dtypes(manifest)
    collections = {path.split("/")[0] for path in manifest.nodes}
    kept = {name: value for name, value in template.items() if name in collections}
    return jax.tree_util.tree_map_with_path(
        lambda key, leaf: jax.ShapeDtypeStruct(
            leaf.shape, dtypes.get(path_name(key), leaf.dtype)
        ),
        kept,
    )


def _difference(path: str, stored: Node | None, wanted: Node | None) -> str:
    """Says how a node of the checkpoint differs from the model's; empty if equal."""
    if stored is None or wanted is None:
        sides = ("the model", "the checkpoint")
        has, lacks = sides if stored is None else reversed(sides)
        return f"{has} has {path} and {lacks} has not"
    if isinstance(stored, FrozenRecord) and isinstance(wanted, FrozenRecord):
        changes = list(config.differences(stored.cfg, wanted.cfg))
        if changes:
            return f"the config of {path}, checkpoint against model: {_few(changes)}"
        changes = [
            f"{field.name} {getattr(stored, field.name)} against "
            f"{getattr(wanted, field.name)}"
            for field in dataclasses.fields(FrozenRecord)
            if field.compare
            and getattr(stored, field.name) != getattr(wanted, field.name)
            and field.name != "identity"
            and not (field.name == "removed" and stored.removed is None)
        ]
        return f"{path}, checkpoint against model: {_few(changes)}" if changes else ""
    if isinstance(stored, Frozen) and isinstance(wanted, Frozen):
        # The record names the differences of their grids.
        same = (stored.dtype, stored.order, stored.padding) == (
            wanted.dtype,
            wanted.order,
            wanted.padding,
        )
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

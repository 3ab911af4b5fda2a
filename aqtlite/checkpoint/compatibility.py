"""Comparison of a converted checkpoint with the model that will serve it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from aqtlite import config
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import Frozen, Manifest, Node, Plain, describe
from aqtlite.checkpoint.names import name_of
from aqtlite.checkpoint.variables import Variables
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.program.serving import conversion
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    IDENTITY,
    RECORD,
    FrozenRecord,
)
from aqtlite.program.serving.planning import Plan


def abstract_serving(
    manifest: Manifest, variables: Variables, where: str
) -> tuple[Any, Plan]:
    """Plans the serving variables of a model, and checks that a checkpoint holds them.

    Args:
        manifest: the manifest of the checkpoint.
        variables: variables of the model.
        where: path of the checkpoint, for error messages.

    Returns:
        A template of the serving variables, with statistics in their stored form, and
        the plan of the conversion.

    Raises:
        CheckpointError: if the checkpoint and the model differ.
    """
    try:
        template = variables.stored(manifest)
        plan = variables.plan(template)
        nodes = manifest.nodes.items()
        frozen = {p: one for p, one in nodes if isinstance(one, Frozen)}
        frozen_packed = {p for p, one in frozen.items() if one.packed is not None}
        names = {w.path: name_of((COLLECTION, *w.path)) for w in plan.weights}
        floats = [path for path, name in names.items() if name not in frozen]
        packed = [path for path, name in names.items() if name in frozen_packed]
        serving = conversion.serving(plan.keep_float(floats), packed)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is of another model, {_short(manifest.model)}: this one, "
            f"{_short(variables.name)}, fails with the sample inputs of the "
            f"conversion: {error}"
        ) from error
    tree = variables.tree_of(serving, manifest.arrays)
    tree = _with_stored_values(tree, (), manifest)
    check(manifest, tree, where)
    return variables.without_samples(serving, tree, manifest.arrays), plan


def _with_stored_values(node: Any, path: tuple[str, ...], manifest: Manifest) -> Any:
    """Reduces the stored sample values of floats to those that the checkpoint has.

    Older checkpoints have fewer sample values, or none.
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


_NOT_COMPARED: dict[type, set[str]] = {
    FrozenRecord: {"identity"},
    # Differences of grids are reported for the record.
    Frozen: {"arrays", "numerics", "origin", "decibels"},
    # Index among the parameters. Added or removed parameters are reported themselves.
    FrozenKernel: {"number"},
    Plain: set(),
}


def _difference(path: str, stored: Node | None, wanted: Node | None) -> str:
    """Describes how a checkpoint's node differs from the model's; empty if equal."""
    if stored is None or wanted is None:
        sides = ("the model", "the checkpoint")
        has, lacks = sides if stored is None else reversed(sides)
        return f"{has} has {path} and {lacks} has not"
    if isinstance(stored, FrozenRecord) and isinstance(wanted, FrozenRecord):
        changes = list(config.differences(stored.cfg, wanted.cfg))
        if changes:
            return f"the config of {path}, checkpoint against model: {_few(changes)}"
    if type(stored) is not type(wanted):
        return f"{path} is {stored} in the checkpoint, {wanted} in the model"
    changes = [
        f"{field.name} {getattr(stored, field.name)} against "
        f"{getattr(wanted, field.name)}"
        for field in dataclasses.fields(stored)
        if field.compare
        and field.name not in _NOT_COMPARED[type(stored)]
        and getattr(stored, field.name) != getattr(wanted, field.name)
        # Older records do not have this field.
        and not (field.name == "removed" and getattr(stored, "removed", ()) is None)
    ]
    return f"{path}, checkpoint against model: {_few(changes)}" if changes else ""


def _few(differences: list[str]) -> str:
    first, *others = differences
    return f"{first} (and {len(others)} more differences)" if others else first


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."

"""Planning the job that a conversion of a model is, whatever its framework."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.manifest import Frozen, Manifest, Plain
from aqtlite.checkpoint.names import name_of, plain
from aqtlite.checkpoint.nodes import describe
from aqtlite.program.serving import conversion
from aqtlite.program.serving.conversion import WeightFreezer
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import Buffer
from aqtlite.program.serving.planning import Plan, Weight

_FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the variables of a model, in the target of a conversion."""

    collection: str
    """First step of the names of parameters."""

    params: Sequence[str]
    """Names of the parameters, by number."""

    buffer: Callable[[Buffer], str]
    """Function from a variable that is no parameter to its name."""

    origin: Mapping[str, str]
    """Names in the source, by name in the target."""


def job(
    source: Reader,
    plan: Plan,
    names: Names,
    keep_float: Sequence[str],
    manifest: Manifest,
    tree_of: Callable[[Any], Any] = lambda serving: serving,
) -> Job:
    """Plans a conversion on disk.

    Args:
        source: the float checkpoint.
        plan: conversion of the variables of the model, as shapes.
        names: names of these variables.
        keep_float: patterns of paths of weights, or of the parameters that they are
            functions of, to leave in float.
        manifest: manifest to complete with nodes and arrays.
        tree_of: function from serving variables to a tree of them.

    Raises:
        CheckpointError: if a pattern matches nothing, or weights are no floats.
    """
    plan = _without(plan, names, keep_float)
    nodes, stored = describe(tree_of(conversion.convert(plan)))
    tasks = []
    freezer = WeightFreezer()
    for weight in plan.weights:
        path = name_of((COLLECTION, *weight.path))
        node = nodes[path]
        if not isinstance(node, Frozen):
            raise TypeError(f"{path} is {node}")
        inputs = [names.params[p.number] for p in weight.sources]
        inputs += [names.buffer(buffer) for buffer in weight.buffers]
        origins = {name: source.arrays[names.origin[name]] for name in inputs}
        nodes[path] = dataclasses.replace(node, origin=origins)
        fields = node.fields()
        identity = "/".join((COLLECTION, *weight.path[:-1], "identity"))
        if identity in stored:
            fields["identity"] = identity
        sources = tuple(names.origin[name] for name in inputs)
        for name in sources[: len(weight.sources)]:
            if source.arrays[name].dtype not in _FLOATS:
                raise CheckpointError(
                    f"{name} is {source.arrays[name]}; weights are converted from "
                    f"{', '.join(dtype.name for dtype in _FLOATS)}"
                )
        make = functools.partial(freezer.freeze, weight)
        tasks.append(Task(path, sources, fields, make))
    # The order in which a target is written.
    tasks.sort(key=lambda task: task.path.split("/"))
    copies = {
        node.array: names.origin[node.array]
        for node in nodes.values()
        if isinstance(node, Plain) and node.array in names.origin
    }
    manifest = dataclasses.replace(manifest, nodes=nodes, arrays=stored)
    return Job(manifest, tuple(tasks), copies)


def _without(plan: Plan, names: Names, keep_float: Sequence[str]) -> Plan:
    """Leaves weights in float whose names match a pattern."""
    unused = set(keep_float)

    def keeps(weight: Weight) -> bool:
        own = name_of((COLLECTION, *weight.path))
        inputs = [names.params[p.number] for p in weight.parameters]
        named = [plain(name) for name in (own, *inputs)]
        named += [name.removeprefix(f"{names.collection}/") for name in named]
        matching = {
            pattern
            for pattern in keep_float
            if any(fnmatch.fnmatchcase(name, pattern) for name in named)
        }
        unused.difference_update(matching)
        return bool(matching)

    plan = plan.keep_float([w.path for w in plan.weights if keeps(w)])
    if unused:
        weights = ", ".join(
            names.params[p.number] for w in plan.weights[:8] for p in w.parameters
        )
        raise CheckpointError(
            f"no weight matches {', '.join(sorted(unused))}; there are {weights}, ..."
        )
    return plan

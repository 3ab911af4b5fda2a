"""Planning the job that a conversion of a model is, whatever its framework."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.manifest import Frozen, Manifest, Plain
from aqtlite.checkpoint.names import name_of, plain
from aqtlite.checkpoint.nodes import describe
from aqtlite.program.serving import report as report_lib
from aqtlite.program.serving.call_site import COLLECTION
from aqtlite.program.serving.conversion import WeightFreezer
from aqtlite.program.serving.model import Buffer
from aqtlite.program.serving.planning import Weight
from aqtlite.program.serving.report import ConversionReport

_FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


class Conversion(Protocol):
    """A planned conversion."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that will be frozen."""

    def keep_float(self, paths: Collection[tuple[str, ...]]) -> "Conversion":
        """Returns a conversion that leaves weights with these paths in float."""

    def run(self) -> tuple[Any, ConversionReport]:
        """Returns a tree of serving variables, and what became of each parameter."""


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
    conversion: Conversion,
    names: Names,
    keep_float: Sequence[str],
    manifest: Manifest,
) -> Job:
    """Plans a conversion on disk.

    Args:
        source: the float checkpoint.
        conversion: conversion of the variables of the model, as shapes.
        names: names of these variables.
        keep_float: patterns of paths of weights, or of the parameters that they are
            functions of, to leave in float.
        manifest: manifest to complete with nodes and arrays.

    Raises:
        CheckpointError: if a pattern matches nothing, or weights are no floats.
    """
    conversion = _without(conversion, names, keep_float)
    serving, report = conversion.run()
    report_lib.log(report)
    nodes, stored = describe(serving)
    tasks = []
    freezer = WeightFreezer()
    for weight in conversion.weights:
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


def _without(
    conversion: Conversion, names: Names, keep_float: Sequence[str]
) -> Conversion:
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

    conversion = conversion.keep_float([w.path for w in conversion.weights if keeps(w)])
    if unused:
        weights = ", ".join(
            names.params[p.number] for w in conversion.weights[:8] for p in w.parameters
        )
        raise CheckpointError(
            f"no weight matches {', '.join(sorted(unused))}; there are {weights}, ..."
        )
    return conversion

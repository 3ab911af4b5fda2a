"""Jobs: the weights of a model to freeze, and the arrays to copy."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.manifest import (
    NNX,
    Frozen,
    Manifest,
    Plain,
    Stored,
    describe,
)
from aqtlite.checkpoint.names import name_of, path_name, plain
from aqtlite.checkpoint.packing import packing_of
from aqtlite.checkpoint.variables import Variables
from aqtlite.program.serving import conversion, packing
from aqtlite.program.serving.conversion import FrozenWeight, WeightFreezer
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.planning import Plan
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.statistics import records_of

_FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class Task:
    """One weight to freeze."""

    path: str
    """Path of the weight in the serving variables."""

    inputs: tuple[str, ...]
    """Names in the source of the arrays that the weight is computed from."""

    fields: Mapping[str, str]
    """Names of the arrays in the target, by field: "qvalue", "scale", ..."""

    make: Callable[..., FrozenWeight]
    """Function that maps the inputs to the frozen weight."""

    prepared: Callable[..., Any]
    """Function that maps the inputs to the array that is quantized."""

    store: Callable[[QTensor], QTensor]
    """Function that packs the integers of the weight, if they are stored packed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A planned conversion."""

    manifest: Manifest
    """Manifest of the target, without checksums and signal-to-noise ratios."""

    tasks: tuple[Task, ...]
    copies: Mapping[str, str]
    """Names in the source of the arrays to copy, by name in the target."""


def job_of(
    source: Reader,
    variables: Variables,
    keep_float: Sequence[str],
    packed: str | None,
) -> Job:
    """Plans a conversion from shapes only.

    Args:
        source: the float checkpoint.
        variables: variables of the model.
        keep_float: patterns of the paths of weights to leave in float, or of the
            parameters that they are computed from.
        packed: as in `aqtlite.flax.convert`.

    Raises:
        CheckpointError: if the model cannot be traced, the source is not of this model
            or holds weights that are not floats, a pattern matches nothing, or the
            sample inputs cannot be stored though loading needs them.
        ValueError: as `aqtlite.flax.convert` does.
    """
    sample = _sample_of(variables)
    template, origin = variables.match(source)
    _check_statistics(source, origin, variables, template)
    plan = variables.plan(template)
    params = variables.params(plan, origin)
    plan = _without(plan, variables.collection, params, keep_float)
    serving = conversion.convert(plan, packed=packed)
    nodes, stored = describe(variables.tree_of(serving, origin))
    tasks = []
    freezer = WeightFreezer()
    for weight in plan.weights:
        path = name_of((COLLECTION, *weight.path))
        node = nodes[path]
        if not isinstance(node, Frozen):
            raise TypeError(f"{path} is {node}")
        inputs = [
            params[one.number] if isinstance(one, Parameter) else variables.buffer(one)
            for one in weight.inputs
        ]
        of_parameters = [
            name
            for name, one in zip(inputs, weight.inputs, strict=True)
            if isinstance(one, Parameter)
        ]
        _check_floats(source, [origin[name] for name in of_parameters])
        origins = {name: source.arrays[origin[name]] for name in of_parameters}
        nodes[path] = dataclasses.replace(node, origin=origins)
        fields = dict(node.arrays)
        identity = "/".join((COLLECTION, *weight.path[:-1], "identity"))
        if identity in stored:
            fields["identity"] = identity
        sources = tuple(origin[name] for name in inputs)
        if node.packed is None and not source.quantized.isdisjoint(sources):
            name = fields["qvalue"]
            stored[name] = _with_all_codes(stored[name])
        make = functools.partial(freezer.freeze, weight)
        prepared = functools.partial(freezer.prepared, weight)
        store: Callable[[QTensor], QTensor] = _as_it_is
        if node.packed is not None:
            store = functools.partial(packing.pack, weight.record)
        tasks.append(Task(path, sources, fields, make, prepared, store))
    # Targets are written in this order.
    tasks.sort(key=lambda task: task.path.split("/"))
    copies = {
        node.array: origin[node.array]
        for node in nodes.values()
        if isinstance(node, Plain) and node.array in origin
    }
    manifest = Manifest(
        nodes,
        stored,
        model=variables.name,
        sample=sample,
        framework=variables.framework,
    )
    return Job(manifest, tuple(tasks), copies)


def _sample_of(variables: Variables) -> Any:
    """The sample inputs as the manifest records them; None if it cannot."""
    sample = sample_lib.encode(variables.args, variables.kwargs)
    if sample is None and variables.framework == NNX:
        raise CheckpointError(
            "the sample inputs of an NNX model have to be arrays, shapes and plain "
            "Python values, in dictionaries, lists, named tuples and dataclasses of "
            "imported modules that are pytrees: the manifest records them, and loading "
            "traces the model with them"
        )
    return sample


def _check_floats(source: Reader, names: Sequence[str]) -> None:
    for name in names:
        if source.arrays[name].dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} is {source.arrays[name]}; weights are converted from "
                f"{', '.join(dtype.name for dtype in _FLOATS)}"
            )


def _as_it_is(q: QTensor) -> QTensor:
    return q


def _with_all_codes(stored: Stored) -> Stored:
    """Packs by the dtype, where that takes no more bits than by the grid.

    Other libraries' symmetric grids have the lowest value, -8 in 4 bits, and the
    library's own do not.
    """
    of_dtype = packing_of(stored.info)
    if stored.packing is None or of_dtype is None:
        return stored
    is_wider = of_dtype.bits > stored.packing.bits
    return stored if is_wider else dataclasses.replace(stored, packing=of_dtype)


def _check_statistics(
    source: Reader, origin: Mapping[str, str], variables: Variables, template: Any
) -> None:
    """Checks that statistics of activations come from at least one batch."""
    for path, _ in records_of(variables.statistics(template)):
        stored_as = origin[f"{path_name(path)}/batches"]
        if not (source.read(stored_as) > 0).all():
            raise CheckpointError(
                f"{stored_as} is 0: the statistics of activations have seen no batch. "
                f"Gather some with {variables.calibrate}, and save these variables; "
                "or gather them here, with --calibrate (calibrate=)"
            )


def _without(
    plan: Plan, collection: str, params: Sequence[str], keep_float: Sequence[str]
) -> Plan:
    """Drops weights that match a pattern from the plan, so that they stay in float."""
    unused = set(keep_float)

    def keeps(weight: Weight) -> bool:
        own = name_of((COLLECTION, *weight.path))
        inputs = [params[p.number] for p in weight.parameters]
        named = [plain(name) for name in (own, *inputs)]
        named += [name.removeprefix(f"{collection}/") for name in named]
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
            params[p.number] for w in plan.weights[:8] for p in w.parameters
        )
        raise CheckpointError(
            f"no weight matches {', '.join(map(repr, sorted(unused)))}; there are "
            f"{weights}, ..."
        )
    return plan

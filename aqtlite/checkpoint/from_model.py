"""Planning the conversion of a Flax model's checkpoint."""

import dataclasses
import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.manifest import Frozen, Manifest, Node, Plain, Stored
from aqtlite.checkpoint.names import name_of, path_name, plain
from aqtlite.checkpoint.packing import packing_of
from aqtlite.checkpoint.variables import PARAMS, info_of, match
from aqtlite.flax.call import Call
from aqtlite.flax.linen import convert as linen_convert
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.qtensor import QTensor
from aqtlite.serving import report as report_lib
from aqtlite.serving.call_site import COLLECTION, CallSite
from aqtlite.serving.conversion import WeightFreezer
from aqtlite.serving.model import Parameter
from aqtlite.state_collections import STATISTICS

_FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


def job_from_model(
    source: Reader,
    model: Model,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_float: Sequence[str],
) -> Job:
    """Plans the conversion that `aqtlite.flax.convert` does, from shapes alone.

    Args:
        source: variables, or their collection "params" alone. Where the model boxes a
            parameter (`nn.with_partitioning`), the source may hold it without the box.
        model: as `convert` takes it.
        args: as `convert` takes them; shapes will do.
        kwargs: the same.
        keep_float: patterns of paths of weights, or of the parameters that they are
            functions of, to leave in float.

    Raises:
        CheckpointError: if the model cannot be traced, the source is not of this
            model, or a pattern matches nothing.
        ValueError: as `convert` does.
    """
    arrays = source.arrays
    variables, origin = match(source, model, args, kwargs)
    _check_statistics(source, origin)
    params = [name for name in origin if name.startswith(f"{PARAMS}/")]
    unused = set(keep_float)

    def keep(path: tuple[str, ...], inputs: tuple[Parameter, ...]) -> bool:
        own = name_of((COLLECTION, *path))
        named = [plain(name) for name in (own, *(params[p.number] for p in inputs))]
        named += [name.removeprefix(f"{PARAMS}/") for name in named]
        matching = {
            pattern
            for pattern in keep_float
            if any(fnmatch.fnmatchcase(name, pattern) for name in named)
        }
        unused.difference_update(matching)
        return bool(matching)

    plan = linen_convert.plan(model, variables, [Call(*args, **kwargs)])
    plan = plan.keep_float([w.path for w in plan.weights if keep(w.path, w.parameters)])
    serving, report = plan.run()
    freezer = WeightFreezer()
    if unused:
        weights = ", ".join(
            params[p.number] for w in plan.weights[:8] for p in w.parameters
        )
        raise CheckpointError(
            f"no weight matches {', '.join(sorted(unused))}; there are {weights}, ..."
        )
    report_lib.log(report)
    nodes, stored = describe(serving)
    frozen = {path: node for path, node in nodes.items() if isinstance(node, Frozen)}
    tasks = []
    for weight in plan.weights:
        path = name_of((COLLECTION, *weight.path))
        node = frozen[path]
        inputs = [params[p.number] for p in weight.sources]
        inputs += [path_name(buffer.key_path) for buffer in weight.buffers]
        origins = {name: arrays[origin[name]] for name in inputs}
        nodes[path] = dataclasses.replace(node, origin=origins)
        fields = node.fields()
        identity = "/".join((COLLECTION, *weight.path[:-1], "identity"))
        if identity in stored:
            fields["identity"] = identity
        sources = tuple(origin[name] for name in inputs)
        for name in sources[: len(weight.sources)]:
            if arrays[name].dtype not in _FLOATS:
                raise CheckpointError(
                    f"{name} is {arrays[name]}; weights are converted from "
                    f"{', '.join(dtype.name for dtype in _FLOATS)}"
                )
        make = functools.partial(freezer.freeze, weight)
        tasks.append(Task(path, sources, fields, make))
    # The order in which a target is written.
    tasks.sort(key=lambda task: task.path.split("/"))
    copies = {
        node.array: origin[node.array]
        for node in nodes.values()
        if isinstance(node, Plain) and node.array in origin
    }
    sample = sample_lib.encode(args, kwargs)
    manifest = Manifest(nodes, stored, model=repr(model), sample=sample)
    return Job(manifest, tuple(tasks), copies)


def _check_statistics(source: Reader, origin: Mapping[str, str]) -> None:
    """Raises CheckpointError if statistics of activations are of no batch."""
    for name, stored_as in origin.items():
        is_count = name.startswith(f"{STATISTICS}/") and name.endswith("/batches")
        if is_count and not (source.read(stored_as) > 0).all():
            raise CheckpointError(
                f"{stored_as} is 0: the statistics of activations are of no batch. "
                "Gather some with aqtlite.flax.calibrate, and save these variables"
            )


def describe(serving: Any) -> tuple[dict[str, Node], dict[str, Stored]]:
    """Lists the nodes of serving variables, given as shapes, and their arrays."""
    nodes: dict[str, Node] = {}
    arrays: dict[str, Stored] = {}

    def is_node(x: Any) -> bool:
        return isinstance(x, QTensor | CallSite) or nn.meta.is_axis_metadata(x)

    for key_path, node in jax.tree_util.tree_flatten_with_path(serving, is_node)[0]:
        path = path_name(key_path)
        if isinstance(node, CallSite | FrozenKernel):
            nodes[path] = node
            continue
        named = {
            "/".join(filter(None, (path, path_name(below)))): info_of(leaf)
            for below, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
        }
        arrays.update(
            {name: Stored(info, packing_of(info)) for name, info in named.items()}
        )
        if isinstance(node, QTensor):
            prefix = f"{path}/"
            # A box is a step of its own below the field.
            fields = {
                name.removeprefix(prefix).partition("/")[0]: name for name in named
            }
            qvalue = fields["qvalue"]
            arrays[qvalue] = Stored(
                named[qvalue], packing_of(named[qvalue], node.numerics)
            )
            nodes[path] = Frozen(
                qvalue,
                fields["scale"],
                fields.get("zero_point"),
                fields.get("sums"),
                jnp.dtype(node.dtype),
                node.order,
                node.numerics,
                origin={},
                padding=node.padding,
            )
        else:
            (name,) = named
            nodes[path] = Plain(name)
    return nodes, arrays

"""Finding the weights of a Flax model in a checkpoint."""

import dataclasses
import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.from_rules import grid_name
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.manifest import Frozen, Manifest, Node, Plain, Stored
from aqtlite.checkpoint.names import name_of, path_name, plain
from aqtlite.checkpoint.sources import Source
from aqtlite.flax.linen import convert as linen_convert
from aqtlite.flax.linen.call import Call
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.jaxpr import tracing
from aqtlite.qtensor import QTensor
from aqtlite.serving import report as report_lib
from aqtlite.serving.call_site import COLLECTION, CallSite
from aqtlite.serving.conversion import WeightFreezer
from aqtlite.serving.model import Parameter

_PARAMS = "params"
_FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


def job_from_model(
    source: Source,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_float: Sequence[str],
) -> Job:
    """Plans what `aqtlite.flax.convert` would do, from shapes alone.

    Args:
        source: variables, or their collection "params" alone. Where the model boxes a
            parameter (`nn.with_partitioning`), the source may hold it without the box.
        model: as `convert` takes it.
        args: as `convert` takes them; shapes will do.
        kwargs: the same.
        keep_float: patterns of paths of weights, or of the parameters that they are
            made of, to leave in float.

    Raises:
        CheckpointError: if the source is not of this model, or a pattern matches
            nothing.
        ValueError: as `convert` does.
    """
    arrays = source.arrays
    variables, origin = _variables(source, model, args, kwargs)
    params = [name for name in origin if name.startswith(f"{_PARAMS}/")]
    unused = set(keep_float)

    def keep(path: tuple[str, ...], inputs: tuple[Parameter, ...]) -> bool:
        own = name_of((COLLECTION, *path))
        named = [plain(name) for name in (own, *(params[p.number] for p in inputs))]
        named += [name.removeprefix(f"{_PARAMS}/") for name in named]
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
        inputs = [params[p.number] for p in weight.parameters]
        nodes[path] = dataclasses.replace(
            node,
            origin={name: arrays[origin[name]] for name in inputs},
            grid=grid_name(weight.tensor),
        )
        names = {"qvalue": node.qvalue, "scale": node.scale}
        identity = "/".join((COLLECTION, *weight.path[:-1], "identity"))
        if identity in stored:
            names["identity"] = identity
        fields = {field: (name, stored[name].info) for field, name in names.items()}
        sources = tuple(origin[name] for name in inputs)
        for name in sources:
            if arrays[name].dtype not in _FLOATS:
                raise CheckpointError(
                    f"{name} is {arrays[name]}; weights are converted from "
                    f"{', '.join(dtype.name for dtype in _FLOATS)}"
                )
        tasks.append(
            Task(path, sources, fields, functools.partial(freezer.freeze, weight))
        )
    # In the order in which a target is written.
    tasks.sort(key=lambda task: task.path.split("/"))
    copies = {
        node.array: origin[node.array]
        for node in nodes.values()
        if isinstance(node, Plain) and node.array in origin
    }
    sample = sample_lib.encode(args, kwargs)
    manifest = Manifest(nodes, stored, model=repr(model), sample=sample)
    return Job(manifest, tuple(tasks), copies)


def describe(serving: Any) -> tuple[dict[str, Node], dict[str, Stored]]:
    """The nodes of serving variables, given as shapes, and the arrays in them."""
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
            "/".join(filter(None, (path, path_name(below)))): Stored(_info(leaf))
            for below, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
        }
        arrays.update(named)
        if isinstance(node, QTensor):
            qvalue, scale = named
            dtype = jnp.dtype(node.dtype)
            nodes[path] = Frozen(qvalue, scale, dtype, node.order, origin={}, grid="")
        else:
            (name,) = named
            nodes[path] = Plain(name)
    return nodes, arrays


def abstract_variables(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The shapes of a model's float variables."""

    def init(call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Any:
        # These are of `apply` alone.
        init_kwargs = {
            k: v for k, v in call_kwargs.items() if k not in ("mutable", "rngs")
        }
        return model.init(jax.random.key(0), *call_args, **init_kwargs)

    flat, inputs = tracing.close_over_constants(
        init, (args, dict(kwargs)), tracing.is_array
    )
    shapes = jax.eval_shape(flat, inputs)
    return {name: value for name, value in shapes.items() if name != COLLECTION}


def _info(leaf: Any) -> ArrayInfo:
    return ArrayInfo(tuple(leaf.shape), jnp.dtype(leaf.dtype))


def _variables(
    source: Source,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Shapes of the variables that the source holds, and its names of them."""
    template = abstract_variables(model, args, kwargs)
    arrays = source.arrays
    if any(name.startswith(f"{COLLECTION}/") for name in arrays):
        raise CheckpointError(
            f"the source holds frozen weights already (collection '{COLLECTION}'); "
            "convert the float checkpoint of training"
        )
    has_collections = any(name.startswith(f"{_PARAMS}/") for name in arrays)
    # A collection that the source lacks is one that serving makes, such as "cache".
    found = {
        name: value
        for name, value in template.items()
        if name == _PARAMS or any(array.startswith(f"{name}/") for array in arrays)
    }
    without_boxes = _names_without_boxes(found)
    values = {name: value for name, value in source.values.items() if value is not None}
    origin: dict[str, str] = {}
    wrong: list[str] = []

    def look_up(key_path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = path_name(key_path)
        boxed, unboxed = (
            n if has_collections else n.removeprefix(f"{_PARAMS}/")
            for n in (name, without_boxes[name])
        )
        found_as = boxed if boxed in arrays else unboxed
        origin[name] = found_as
        if found_as in values:
            wrong.append(f"{found_as} is {values[found_as]!r}, which is no array")
            return leaf
        if found_as not in arrays:
            wrong.append(f"{found_as} is missing")
            return leaf
        info = arrays[found_as]
        if info.shape != tuple(leaf.shape):
            wrong.append(f"{found_as} is {info}, the model's is {_info(leaf)}")
        return jax.ShapeDtypeStruct(leaf.shape, info.dtype)

    variables = jax.tree_util.tree_map_with_path(look_up, found)
    known = set(origin.values())
    wrong += [
        f"{name} is not in the model"
        for name in (*arrays, *values)
        if name not in known
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the source does not hold the variables of this model: "
            f"{'; '.join(wrong[:5])}{more}"
        )
    return variables, origin


def _names_without_boxes(variables: Any) -> dict[str, str]:
    """For the name of each leaf, its name if the box around it were not there."""
    names: dict[str, str] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(
        variables, is_leaf=nn.meta.is_axis_metadata
    )[0]:
        below = [sub for sub, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
        for sub in below:
            outside = path if len(below) == 1 else (*path, *sub)
            names[path_name((*path, *sub))] = path_name(outside)
    return names

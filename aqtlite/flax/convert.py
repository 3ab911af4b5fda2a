"""The serving conversion: float parameters in, frozen integer weights out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import core as flax_core
from flax import linen as nn
from jax.extend import core

from aqtlite.flax import partitioning, program, recording, site
from aqtlite.flax.placeholder import FrozenKernel
from aqtlite.qtensor import QTensor


def convert(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Freezes the quantized weights of a trained model into its variables.

    The model is traced once, with every contraction recording its quantized operands.
    An operand is a *weight* if its value depends on nothing but parameters and
    constants: not on `args` and `kwargs`, on other collections, or on rngs. That is
    read off the traced program, so that a transposed, cast, stacked or otherwise
    transformed parameter counts as much as a plain one;
    ``AqtDotGeneral(frozen_operands=...)`` overrides it. Only the part of the program
    that makes the weights is run. No inference is.

    Args:
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside.
        variables: its trained variables, or their shapes (`jax.ShapeDtypeStruct`).
        *args: what ``model.apply(variables, *args, **kwargs)`` takes in serving;
            arrays may be given as shapes.
        **kwargs: the same. `method`, `rngs` and `mutable` are `apply`'s.

    Returns:
        The serving variables: `variables` with a collection "aqt" that holds, under
        the path of each module that contracts a weight, its integers and scales, and
        with a `FrozenKernel` (a pytree node without numbers) in place of each
        parameter that nothing else reads. ``model.apply(serving, x)`` serves, with
        the same model. Partitioning metadata carries over to the integers and, with
        None for the axes that share a scale, to the scales.

    Raises:
        ValueError: if the variables are converted already or lack "params", if the
            model has nothing to freeze, if `frozen_operands` names an operand that
            depends on the inputs, if one module contracts different weights under
            one name, or if a transformation around a layer does not lift "aqt".

    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((2, 3))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> serving = convert(dense, variables, x)
    >>> serving["aqt"]["AqtContraction_0"]["rhs"].qvalue.dtype
    dtype('int8')
    >>> bool((dense.apply(serving, x) == dense.apply(variables, x)).all())
    True
    """
    variables = checked(variables)
    traced = recording.trace_recording(model, variables, args, kwargs)
    sites, weights = recording.records(traced)
    return assemble(model, variables, traced, sites, weights, args, kwargs)


def assemble(
    model: nn.Module,
    variables: Mapping[str, Any],
    traced: recording.Traced,
    sites: Mapping[tuple[str, ...], site.Site],
    weights: Sequence[recording.Record],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The serving variables, of a traced model and the weights chosen in it."""
    frozen = _freeze(traced, variables, sites, weights)
    serving = dict(variables)
    serving[site.COLLECTION] = frozen
    serving["params"] = _without_dead_kernels(model, serving, traced, args, kwargs)
    for path, node in recording.flatten_records(frozen):
        if isinstance(node, site.Site):
            removed = _removed_names(serving["params"], path[:-2])
            _put(frozen, path, dataclasses.replace(node, removed=removed))
    return serving


def _removed_names(params: Any, path: tuple[str, ...]) -> tuple[str, ...]:
    for step in path:
        params = params.get(step, {})
    entries = params.items()
    return tuple(name for name, node in entries if isinstance(node, FrozenKernel))


def checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Float variables, as plain dictionaries.

    Raises:
        ValueError: if they are none, or hold frozen weights.
    """
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            "convert takes the variables of a Linen model, a mapping with a collection "
            f"'params'; got {type(variables).__name__}"
            + (f" of {sorted(variables)}" if isinstance(variables, Mapping) else "")
        )
    if jax.tree.leaves(variables.get(site.COLLECTION, {})):
        raise ValueError(
            f"the variables hold frozen weights already (collection "
            f"'{site.COLLECTION}'); convert takes the float variables of training"
        )
    return {name: flax_core.unfreeze(value) for name, value in variables.items()}


def _freeze(traced: recording.Traced, variables, sites, weights) -> dict[str, Any]:
    """Runs the part of the program that makes the weights; returns the collection."""
    wanted = [i for r in weights for operand in r.operands for i in operand.outputs]
    cut, kept = program.cut(traced.program, wanted)
    inputs = [traced.inputs[i] for i in kept]
    values = iter(_run(cut, inputs))
    collection: dict[str, Any] = {}
    for scope, node in sites.items():
        _put(collection, (*scope, "site"), node)
    boxes = partitioning.boxes(cut, kept, variables["params"])
    position = 0
    for path, side, operands, _ in weights:
        first, *repeats = (
            jax.tree.unflatten(operand.treedef, [next(values) for _ in operand.outputs])
            for operand in operands
        )
        qtensor = check_repeats(first, repeats, path, side)
        qtensor = partitioning.box_qtensor(qtensor, boxes[position])
        position += sum(len(operand.outputs) for operand in operands)
        _put(collection, (*path, side), qtensor)
    return collection


def _run(cut: core.ClosedJaxpr, params: list[Any]) -> list[Any]:
    function = jax.jit(core.jaxpr_as_fun(cut))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in params):
        return jax.eval_shape(function, *params)
    return function(*params)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def check_repeats(
    first: QTensor, repeats: list[QTensor], path: tuple[str, ...], side: str
) -> QTensor:
    """One module called several times: its weight has to be one weight."""
    for again in repeats:
        same = first.qvalue.shape == again.qvalue.shape
        if isinstance(first.qvalue, jax.ShapeDtypeStruct):
            same_values = same
        elif same:
            same_values = jnp.array_equal(first.qvalue, again.qvalue) & (
                jnp.array_equal(first.scale, again.scale)
            )
        else:
            same_values = False
        if isinstance(same_values, jax.core.Tracer):
            # Inside jit nothing can be raised: make a mistake visible.
            scale = jnp.where(same_values, first.scale, jnp.nan)
            first = dataclasses.replace(first, scale=scale)
        elif not same_values:
            raise ValueError(
                f"{'/'.join(path)} contracts different weights as its {side} in "
                "different calls; give each its own module, or an AqtDotGeneral with a "
                "name of its own"
            )
    return first


def _without_dead_kernels(model, serving, traced: recording.Traced, args, kwargs):
    """Takes the parameters out of "params" that only frozen weights were made of."""
    params = serving["params"]
    others = {name: value for name, value in serving.items() if name != "params"}

    def serve(params, others, call_args, call_kwargs):
        out = model.apply({"params": params, **others}, *call_args, **call_kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if recording.is_array(leaf)]

    closed, _, _ = recording.trace_function(serve, params, others, args, kwargs)
    read = frozenset().union(*program.output_dependencies(closed))
    frozen_from = frozenset().union(*_weight_dependencies(traced, serving))
    dead = frozen_from - read
    nodes, treedef = jax.tree.flatten(params, is_leaf=nn.meta.is_axis_metadata)
    position = 0
    for i, node in enumerate(nodes):
        leaves = jax.tree.leaves(node)
        if len(leaves) == 1 and position in dead:
            nodes[i] = FrozenKernel(tuple(leaves[0].shape), np.dtype(leaves[0].dtype))
        position += len(leaves)
    return jax.tree.unflatten(treedef, nodes)


def _weight_dependencies(traced: recording.Traced, serving):
    frozen = {path for path, _ in recording.flatten_records(serving[site.COLLECTION])}
    for path, node in traced.recorded.items():
        base = (*path[:-1], path[-1].partition("#")[0])
        if isinstance(node, recording.Recorded) and base in frozen:
            for output in node.outputs:
                yield traced.dependencies[output]

"""The serving conversion: float parameters in, frozen integer weights out."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import core as flax_core
from flax import linen as nn
from jax.extend import core

from aqtlite.flax import partitioning, program, site
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
    _check_variables(variables)
    variables = {name: flax_core.unfreeze(value) for name, value in variables.items()}
    traced = _trace_recording(model, variables, args, kwargs)
    records = _records(traced)
    frozen = _freeze(traced, variables, records)
    serving = dict(variables)
    serving[site.COLLECTION] = frozen
    serving["params"] = _without_dead_kernels(model, serving, traced, args, kwargs)
    for path, node in _flatten_records(frozen):
        if isinstance(node, site.Site):
            removed = _removed_names(serving["params"], path[:-2])
            _put(frozen, path, dataclasses.replace(node, removed=removed))
    return serving


def _removed_names(params: Any, path: tuple[str, ...]) -> tuple[str, ...]:
    for step in path:
        params = params.get(step, {})
    entries = params.items()
    return tuple(name for name, node in entries if isinstance(node, FrozenKernel))


def _check_variables(variables: Mapping[str, Any]) -> None:
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


class _Traced(NamedTuple):
    """A trace of the recording model."""

    program: core.ClosedJaxpr
    inputs: list[Any]  # the values, or shapes, of the program's inputs
    num_params: int  # the first inputs are the leaves of "params"
    dependencies: list[program.Dependencies]  # of each output
    recorded: dict[tuple[str, ...], Any]  # site path + name -> Site | _Recorded


class _Recorded(NamedTuple):
    """A recorded operand: which outputs of the program are its leaves."""

    outputs: tuple[int, ...]
    treedef: Any


def _trace_recording(model, variables, args, kwargs) -> _Traced:
    kwargs = dict(kwargs)
    mutable = _mutable_collections(kwargs.pop("mutable", False))

    def record(params, others, call_args, call_kwargs):
        with site.converting():
            _, mutated = model.apply(
                {"params": params, **others},
                *call_args,
                mutable=[*mutable, site.COLLECTION],
                **call_kwargs,
            )
        return flax_core.unfreeze(mutated.get(site.COLLECTION, {}))

    others = {name: value for name, value in variables.items() if name != "params"}
    closed, out_tree, inputs = _trace(record, variables["params"], others, args, kwargs)
    recorded: dict[tuple[str, ...], Any] = {}
    position = 0
    for path, node in _flatten_records(out_tree):
        if isinstance(node, site.Site):
            recorded[path] = node
            continue
        leaves, treedef = jax.tree.flatten(node)
        outputs = tuple(range(position, position + len(leaves)))
        recorded[path] = _Recorded(outputs, treedef)
        position += len(leaves)
    return _Traced(
        program=closed,
        inputs=inputs,
        num_params=len(jax.tree.leaves(variables["params"])),
        dependencies=program.output_dependencies(closed),
        recorded=recorded,
    )


def _mutable_collections(mutable: Any) -> list[str]:
    if isinstance(mutable, str):
        return [mutable]
    if isinstance(mutable, bool):
        if mutable:
            raise ValueError(
                "mutable=True is too much for convert; name the collections that the "
                "model changes in serving, such as mutable=['cache']"
            )
        return []
    if not isinstance(mutable, list | tuple | set | frozenset):
        raise TypeError(
            "convert takes mutable= as a name or a list of names of collections, got "
            f"{mutable!r}"
        )
    return list(mutable)


def _flatten_records(tree):
    leaves = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, site.Site | QTensor)
    )[0]
    return [(tuple(key.key for key in path), node) for path, node in leaves]


def _trace(function, *trees):
    """Traces a function of pytrees.

    Python numbers are inputs like arrays, unless the function needs one as such (as a
    shape, or in an `if`); then they are constants, as is every other leaf.

    Returns:
        The closed jaxpr, the tree of outputs (as shapes), and the inputs.
    """
    leaves, treedef = jax.tree.flatten(trees)

    def trace(is_input):
        dynamic = [i for i, leaf in enumerate(leaves) if is_input(leaf)]

        def flat(values):
            filled = list(leaves)
            for i, value in zip(dynamic, values, strict=True):
                filled[i] = value
            return function(*jax.tree.unflatten(treedef, filled))

        inputs = [leaves[i] for i in dynamic]
        closed, out_tree = jax.make_jaxpr(flat, return_shape=True)(inputs)
        return closed, out_tree, inputs

    try:
        return trace(lambda leaf: _is_array(leaf) or _is_number(leaf))
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
    ):
        return trace(_is_array)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


class _Record(NamedTuple):
    """Everything recorded under one scope and side, repeats included."""

    path: tuple[str, ...]  # of the scope
    side: str
    operands: list[_Recorded]


def _records(traced: _Traced) -> tuple[dict[tuple[str, ...], site.Site], list[_Record]]:
    """The sites, each with the operands to freeze, and those operands."""
    sites: dict[tuple[str, ...], site.Site] = {}
    grouped: dict[tuple[tuple[str, ...], str], list[_Recorded]] = {}
    for path, node in traced.recorded.items():
        scope, side = path[:-1], path[-1].partition("#")[0]
        if isinstance(node, _Recorded):
            grouped.setdefault((scope, side), []).append(node)
        else:
            first = sites.setdefault(scope, node)
            if first.cfg != node.cfg:
                raise ValueError(
                    f"{'/'.join(scope)} contracts with two configs under one name; "
                    "give each contraction an AqtDotGeneral with a name of its own"
                )
    if not sites:
        raise ValueError(
            "nothing to freeze: the method that was called has no AqtDotGeneral or "
            "AqtEinsum with a config that quantizes, or has them only inside a "
            "transformation of its own (jax.jit, jnp.einsum), where weights cannot be "
            "frozen; use AqtEinsum in place of jnp.einsum, or serve the variables as "
            "they are"
        )
    weights = {
        key
        for key, operands in grouped.items()
        if all(
            all(index < traced.num_params for index in traced.dependencies[output])
            for operand in operands
            for output in operand.outputs
        )
    }
    records = []
    for (scope, side), operands in grouped.items():
        is_required = side in sites[scope].frozen
        if (scope, side) in weights:
            # Of two weights the lhs may be one that was broadcast to the inputs' batch.
            if is_required or side == "rhs" or (scope, "rhs") not in weights:
                records.append(_Record(scope, side, operands))
        elif is_required:
            raise ValueError(
                f"frozen_operands asks to freeze the {side} of {'/'.join(scope)}, but "
                "its value depends on the model's inputs, on rngs, or on a collection "
                "other than 'params'; use frozen_operands='auto'"
            )
    decided = {
        scope: dataclasses.replace(
            node,
            frozen=tuple(record.side for record in records if record.path == scope),
        )
        for scope, node in sites.items()
    }
    return decided, records


def _freeze(traced: _Traced, variables, records) -> dict[str, Any]:
    """Runs the part of the program that makes the weights; returns the collection."""
    sites, weights = records
    wanted = [i for r in weights for operand in r.operands for i in operand.outputs]
    cut, kept = program.cut(traced.program, wanted)
    inputs = [traced.inputs[i] for i in kept]
    values = iter(_run(cut, inputs))
    collection: dict[str, Any] = {}
    for scope, node in sites.items():
        _put(collection, (*scope, "site"), node)
    boxes = partitioning.boxes(cut, kept, variables["params"])
    position = 0
    for path, side, operands in weights:
        first, *repeats = (
            jax.tree.unflatten(operand.treedef, [next(values) for _ in operand.outputs])
            for operand in operands
        )
        qtensor = _check_repeats(first, repeats, path, side)
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


def _check_repeats(first: QTensor, repeats: list[QTensor], path, side) -> QTensor:
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


def _without_dead_kernels(model, serving, traced: _Traced, args, kwargs):
    """Takes the parameters out of "params" that only frozen weights were made of."""
    params = serving["params"]
    others = {name: value for name, value in serving.items() if name != "params"}

    def serve(params, others, call_args, call_kwargs):
        out = model.apply({"params": params, **others}, *call_args, **call_kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if _is_array(leaf)]

    closed, _, _ = _trace(serve, params, others, args, kwargs)
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


def _weight_dependencies(traced: _Traced, serving):
    frozen = {path for path, _ in _flatten_records(serving[site.COLLECTION])}
    for path, node in traced.recorded.items():
        base = (*path[:-1], path[-1].partition("#")[0])
        if isinstance(node, _Recorded) and base in frozen:
            for output in node.outputs:
                yield traced.dependencies[output]

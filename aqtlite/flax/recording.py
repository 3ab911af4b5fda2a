"""What a model's contractions quantize, found by tracing it once."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import core as flax_core
from flax import linen as nn
from jax.extend import core

from aqtlite.flax import program, site
from aqtlite.qtensor import QTensor


class Traced(NamedTuple):
    """A trace of the recording model."""

    program: core.ClosedJaxpr
    inputs: list[Any]  # the values, or shapes, of the program's inputs
    num_params: int  # the first inputs are the leaves of "params"
    dependencies: list[program.Dependencies]  # of each output
    recorded: dict[tuple[str, ...], Any]  # site path + name -> Site | Recorded


class Recorded(NamedTuple):
    """A recorded operand: which outputs of the program are its leaves."""

    outputs: tuple[int, ...]
    treedef: Any


def trace_recording(
    model: nn.Module,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Traced:
    """Traces a call of the model in which every contraction records its operands.

    Args:
        model: the model.
        variables: its float variables, or their shapes.
        args: what ``model.apply(variables, *args, **kwargs)`` takes, or shapes of it.
        kwargs: the same.
    """
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
    closed, out_tree, inputs = trace_function(
        record, variables["params"], others, args, kwargs
    )
    recorded: dict[tuple[str, ...], Any] = {}
    position = 0
    for path, node in flatten_records(out_tree):
        if isinstance(node, site.Site):
            recorded[path] = node
            continue
        leaves, treedef = jax.tree.flatten(node)
        outputs = tuple(range(position, position + len(leaves)))
        recorded[path] = Recorded(outputs, treedef)
        position += len(leaves)
    return Traced(
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


def flatten_records(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """What a collection of records, or of frozen weights, holds at which path."""
    leaves = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, site.Site | QTensor)
    )[0]
    return [(tuple(key.key for key in path), node) for path, node in leaves]


def trace_function(function, *trees):
    """Traces a function of pytrees.

    Python numbers are inputs like arrays, unless the function needs one as such (as a
    shape, or in an `if`); then they are constants, as is every other leaf.

    Returns:
        The closed jaxpr, the tree of outputs (as shapes), and the inputs.
    """

    def trace(is_input):
        flat, inputs = of_inputs(function, trees, is_input)
        closed, out_tree = jax.make_jaxpr(flat, return_shape=True)(inputs)
        return closed, out_tree, inputs

    try:
        return trace(lambda leaf: is_array(leaf) or _is_number(leaf))
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
    ):
        return trace(is_array)


def of_inputs(
    function: Callable[..., Any],
    trees: tuple[Any, ...],
    is_input: Callable[[Any], bool],
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """A call as a function of some leaves of its arguments, and these leaves."""
    leaves, treedef = jax.tree.flatten(trees)
    dynamic = [i for i, leaf in enumerate(leaves) if is_input(leaf)]

    def flat(values: list[Any]) -> Any:
        filled = list(leaves)
        for i, value in zip(dynamic, values, strict=True):
            filled[i] = value
        return function(*jax.tree.unflatten(treedef, filled))

    return flat, [leaves[i] for i in dynamic]


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a dtype: an array, or the shape of one."""
    return hasattr(leaf, "dtype")


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


class Record(NamedTuple):
    """Everything recorded under one scope and side, repeats included."""

    path: tuple[str, ...]  # of the scope
    side: str
    operands: list[Recorded]
    original: Recorded  # the float operand, of the first call


def records(traced: Traced) -> tuple[dict[tuple[str, ...], site.Site], list[Record]]:
    """The sites, each with the operands to freeze, and those operands."""
    sites: dict[tuple[str, ...], site.Site] = {}
    grouped: dict[tuple[tuple[str, ...], str], list[Recorded]] = {}
    originals: dict[tuple[tuple[str, ...], str], Recorded] = {}
    for path, node in traced.recorded.items():
        scope, side = path[:-1], path[-1].partition("#")[0]
        if side.startswith(site.ORIGINAL):
            key = scope, side.removeprefix(site.ORIGINAL)
            originals.setdefault(key, node)
        elif isinstance(node, Recorded):
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
    kept = []
    for (scope, side), operands in grouped.items():
        is_required = side in sites[scope].frozen
        if (scope, side) in weights:
            # Of two weights the lhs may be one that was broadcast to the inputs' batch.
            if is_required or side == "rhs" or (scope, "rhs") not in weights:
                original = originals[scope, side]
                kept.append(Record(scope, side, operands, original))
        elif is_required:
            raise ValueError(
                f"frozen_operands asks to freeze the {side} of {'/'.join(scope)}, but "
                "its value depends on the model's inputs, on rngs, or on a collection "
                "other than 'params'; use frozen_operands='auto'"
            )
    return freezing(sites, kept), kept


def freezing(
    sites: Mapping[tuple[str, ...], site.Site], records: list[Record]
) -> dict[tuple[str, ...], site.Site]:
    """The sites, each with those of its operands to freeze that were recorded."""
    return {
        scope: dataclasses.replace(
            node,
            frozen=tuple(record.side for record in records if record.path == scope),
        )
        for scope, node in sites.items()
    }

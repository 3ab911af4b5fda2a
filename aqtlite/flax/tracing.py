"""Traces of a model's call, as functions of its arrays."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.extend import core

from aqtlite.flax.site import COLLECTION

_trace_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, init=False)
class Call:
    """What ``model.apply(variables, *args, **kwargs)`` takes: one call of a model.

    Arrays may be given as shapes (`jax.ShapeDtypeStruct`).

    >>> Call((2, 8), train=False, mutable=["cache"])
    Call(args=((2, 8),), kwargs={'train': False, 'mutable': ['cache']})
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced call of a model."""

    program: core.ClosedJaxpr
    inputs: list[Any]
    """Values, or shapes, of the program's inputs: first of all the leaves of "params",
    then those of the other collections."""

    num_params: int
    num_variables: int
    outputs: Any
    """Of the model, and the collections that it changed: a tree of shapes."""

    recorded: Any
    """The collection "aqt" of frozen or recorded weights: a tree of shapes. Its leaves
    are the program's last outputs."""


def trace_call(model: nn.Module, variables: Mapping[str, Any], call: Call) -> Trace:
    """Traces ``model.apply``, with a collection "aqt" that may be written.

    Args:
        model: the model.
        variables: its variables, or their shapes.
        call: what else it takes.
    """
    kwargs = dict(call.kwargs)
    mutable = _mutable_collections(kwargs.pop("mutable", False))
    # Part of what the caches of `nn.jit` compare, so that every trace is a new one.
    this_trace = f"{COLLECTION} trace {next(_trace_numbers)}"

    def apply(params, others, call_args, call_kwargs):
        out, mutated = model.apply(
            {"params": params, **others},
            *call_args,
            mutable=[*mutable, COLLECTION, this_trace],
            **call_kwargs,
        )
        mutated = dict(mutated)
        recorded = mutated.pop(COLLECTION, {})
        out = [leaf for leaf in jax.tree.leaves((out, mutated)) if is_array(leaf)]
        return out, recorded

    others = {name: value for name, value in variables.items() if name != "params"}
    trees = (variables["params"], others, call.args, kwargs)
    closed, (outputs, recorded), inputs, is_input = _trace_function(apply, trees)
    params, *rest = (
        sum(map(is_input, jax.tree.leaves(tree))) for tree in (trees[0], trees[1])
    )
    return Trace(closed, inputs, params, params + sum(rest), outputs, recorded)


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


def _trace_function(function, trees):
    """Traces a function of pytrees.

    Python numbers are inputs like arrays, unless the function needs one as such (as a
    shape, or in an `if`); then they are constants, as is every other leaf.

    Returns:
        The closed jaxpr, the tree of outputs (as shapes), the inputs, and the function
        that says which leaves are inputs.
    """

    def trace(is_input):
        flat, inputs = of_inputs(function, trees, is_input)
        closed, out_tree = jax.make_jaxpr(flat, return_shape=True)(inputs)
        return closed, out_tree, inputs, is_input

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

"""Traces functions of pytrees, and keeps the structure of inputs and outputs."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function."""

    jaxpr: core.ClosedJaxpr
    inputs: Any
    """The arguments, with an input index of the jaxpr in place of each leaf that is an
    input, and None in place of every other leaf."""

    outputs: Any
    """The result, with an output index of the jaxpr in place of each leaf."""

    leaves: tuple[int, ...]
    """For each input of the jaxpr, the index of its leaf in the arguments."""

    def values(self, args: tuple[Any, ...]) -> list[Any]:
        """Returns the inputs of the jaxpr, given arguments of this structure."""
        leaves = jax.tree.leaves(args)
        return [leaves[i] for i in self.leaves]

    def result(self, outputs: Sequence[Any]) -> Any:
        """Returns the result, given the outputs of the jaxpr.

        Outputs that are constants of the program become arrays.
        """
        return jax.tree.map(lambda i: jnp.asarray(outputs[i]), self.outputs)


def trace(function: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """Traces a function of pytrees.

    Python numbers are inputs like arrays, unless the function needs a concrete number
    (as a shape, or in an ``if``); then numbers are constants, like all other leaves.

    Args:
        function: function that returns a pytree of arrays.
        args: arguments of the function, or `jax.ShapeDtypeStruct`s for arrays.
    """
    if any(map(_is_number, jax.tree.leaves(args))):
        # A tracer in place of a number raises TypeError in most uses, such as shapes
        # and NumPy functions, and ValueError as a static argument of `jax.jit`.
        with contextlib.suppress(TypeError, ValueError, IndexError, OverflowError):
            return _trace(function, args, lambda x: is_array(x) or _is_number(x))
    return _trace(function, args, is_array)


def _trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    is_input: Callable[[Any], bool],
) -> Traced:
    flat, inputs = close_over_constants(function, args, is_input)
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(inputs)
    numbers = iter(range(len(inputs)))
    leaves, treedef = jax.tree.flatten(args)
    indices = [next(numbers) if is_input(leaf) else None for leaf in leaves]
    results, out_treedef = jax.tree.flatten(shapes)
    return Traced(
        closed,
        jax.tree.unflatten(treedef, indices),
        jax.tree.unflatten(out_treedef, range(len(results))),
        tuple(i for i, leaf in enumerate(leaves) if is_input(leaf)),
    )


def close_over_constants(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    is_input: Callable[[Any], bool],
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Returns a call as a function of its input leaves, and these leaves.

    Args:
        function: function of `args`.
        args: pytrees.
        is_input: whether a leaf is an input; all others become constants.
    """
    leaves, treedef = jax.tree.flatten(args)
    dynamic = [i for i, leaf in enumerate(leaves) if is_input(leaf)]

    def flat(values: list[Any]) -> Any:
        filled = list(leaves)
        for i, value in zip(dynamic, values, strict=True):
            filled[i] = value
        return function(*jax.tree.unflatten(treedef, filled))

    return flat, [leaves[i] for i in dynamic]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or the shape and dtype of one.

    A scalar type such as `jax.numpy.float32` has a `dtype`, and is none.
    """
    is_described = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return is_described and not isinstance(leaf, type)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)

"""Calls with NNX objects among the arguments, as pure functions of arrays."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

Run = Callable[[Callable[..., Any], Any, Any], Any]
"""Function of a function and its arguments ``(args, kwargs)`` to a pair of pytrees."""


def compiled(fn: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Returns a compiled function of the arguments of `fn`; it updates NNX objects.

    Args:
        fn: the function.
        run: what is computed of it; it may trace `fn`.
    """

    @jax.jit
    def of_arrays(args: Any, kwargs: Any) -> Any:
        return run(fn, args, kwargs)

    def of_state(structure: Any, graphdef: Any, state: Any, others: Any) -> Any:
        nnx: Any = sys.modules["flax.nnx"]

        def pure(state: Any, others: Sequence[Any]) -> Any:
            objects = nnx.merge(graphdef, state)
            given = iter(objects)
            leaves = [next(given) if x is None else x for x in others]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            out = fn(*args, **kwargs)
            _, changed = nnx.split(objects, graph=True)
            before: Any = jax.tree.structure(state)
            if jax.tree.structure(changed) != before:
                raise ValueError(
                    "the tapped function adds or removes variables of an NNX object, "
                    "as `sow` does: take them out of it, with nnx.pop"
                )
            return out, changed

        return run(pure, (state, others), {})

    jitted_of_state = jax.jit(of_state, static_argnums=(0, 1))

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
        objects = [x for x in leaves if _is_object(x)]
        if not objects:
            return of_arrays(args, kwargs)
        nnx: Any = sys.modules["flax.nnx"]
        others = [None if _is_object(x) else x for x in leaves]
        graphdef, state = nnx.split(objects, graph=True)
        (out, changed), taps = jitted_of_state(structure, graphdef, state, others)
        nnx.update(objects, changed)
        return out, taps

    return call


def _is_object(x: Any) -> bool:
    # Where Flax has not been imported, which takes a while, there are none.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return isinstance(x, nnx.Module | nnx.Optimizer | nnx.Variable | nnx.RngStream)

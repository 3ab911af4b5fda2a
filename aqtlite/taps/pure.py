"""Calls with NNX objects among the arguments, as pure functions of arrays."""

import sys
from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[Callable[..., Any], Any, Any], Any]
"""Function of a function and its arguments ``(args, kwargs)`` to a pytree of arrays."""


def compiled(fn: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Returns a compiled function of the arguments of `fn`; it updates NNX objects.

    Args:
        fn: the function.
        run: what is computed of it; it may trace `fn`.
    """

    @jax.jit
    def of_arrays(args: Any, kwargs: Any) -> Any:
        return run(fn, args, kwargs)

    def of_state(graphdef: Any, state: Any) -> Any:
        nnx: Any = sys.modules["flax.nnx"]

        def pure(state: Any) -> Any:
            args, kwargs = nnx.merge(graphdef, state)
            out = fn(*args, **kwargs)
            after, changed = nnx.split([args, kwargs], graph=True)
            if after != graphdef:
                raise ValueError(
                    "the tapped function adds or removes variables of an NNX object, "
                    "as `sow` does: take them out of it, with nnx.pop"
                )
            return out, changed

        (out, changed), taps = run(pure, (state,), {})
        return out, changed, taps

    jitted_of_state = jax.jit(of_state, static_argnums=0)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_objects((args, kwargs)):
            return of_arrays(args, kwargs)
        nnx: Any = sys.modules["flax.nnx"]
        objects = [args, kwargs]
        graphdef, state = nnx.split(objects, graph=True)
        out, changed, taps = jitted_of_state(graphdef, state)
        nnx.update(objects, changed)
        return out, taps

    return call


def _has_objects(tree: Any) -> bool:
    # Where Flax has not been imported, which takes a while, there are none.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False

    def is_object(x: Any) -> bool:
        return isinstance(x, nnx.Module | nnx.Optimizer | nnx.Variable | nnx.RngStream)

    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))

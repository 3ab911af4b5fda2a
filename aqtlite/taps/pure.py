"""Calls with NNX objects among the arguments, as pure functions of arrays."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from aqtlite.program.modules import nnx_arguments
from aqtlite.program.modules.nnx_arguments import Structure

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

    def of_state(structure: Structure, state: Any, others: Any) -> Any:
        def pure(state: Any, others: Sequence[Any]) -> Any:
            out, changed = structure.call(fn, state, others)
            before: Any = jax.tree.structure(state)
            if jax.tree.structure(changed) != before:
                raise ValueError(
                    "the tapped function adds or removes variables of an NNX object, "
                    "as `sow` does: take them out of it, with nnx.pop"
                )
            return out, changed

        return run(pure, (state, others), {})

    jitted_of_state = jax.jit(of_state, static_argnums=0)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, arguments = nnx_arguments.leaves_of((args, kwargs))
        objects = [x for x in leaves if nnx_arguments.is_object(x)]
        if not objects:
            return of_arrays(args, kwargs)
        nnx: Any = sys.modules["flax.nnx"]
        others = [None if nnx_arguments.is_object(x) else x for x in leaves]
        graphdef, state = nnx.split(objects, graph=True)
        structure = Structure(arguments, graphdef)
        (out, changed), taps = jitted_of_state(structure, state, others)
        nnx.update(objects, changed)
        return out, taps

    return call

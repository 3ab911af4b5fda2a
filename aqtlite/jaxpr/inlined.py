"""Functions that JAX traces once for all inputs of equal types."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

_INLINES = getattr(jax, "Inline", None)
_EARLY: Any = True if _INLINES is None else _INLINES.JAX_EARLY
"""Inlining while tracing. Since JAX 0.12, True inlines when a program is lowered."""


def are_tracers(tree: Any) -> bool:
    """Whether all arrays of a pytree are being traced.

    Of an array that is known, states are checked: it must stay so.
    """
    return all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def traced_once(
    function: Callable[..., Any], static_argnums: int | Sequence[int] = ()
) -> Callable[..., Any]:
    """Returns a function whose equations are traced once, and copied into every caller.

    Unlike those of any other `jax.jit`, they are equations of the caller, as if the
    function had been called itself: for `jax.checkpoint` and its policies, for rules,
    and for XLA.

    Args:
        function: the function.
        static_argnums: positions of the arguments that are no arrays.
    """
    jitted: Callable[..., Any] = jax.jit(
        function, static_argnums=static_argnums, inline=_EARLY
    )
    return jitted

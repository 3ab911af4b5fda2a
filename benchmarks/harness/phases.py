"""Compiled programs for a forward pass, or a forward and backward pass."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

FORWARD = "forward"
BOTH = "forward + backward"
PHASES = (FORWARD, BOTH)


def programs(
    forwards: Mapping[str, Callable[..., jax.Array]], arguments: tuple, phase: str
) -> dict[str, Callable[[], Any]]:
    """Compiles each function, and returns calls without arguments.

    Args:
        forwards: functions of `arguments` by name, with results of equal shape.
        arguments: arguments of every function.
        phase: `FORWARD`, or `BOTH` to also compute the gradients of all arguments, for
            a Gaussian gradient of the result.
    """
    return {
        name: _program(forward, arguments, phase) for name, forward in forwards.items()
    }


def forward_and_backward(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The function ``(gradient, *arguments) -> (result, gradients of arguments)``."""

    def both(gradient: jax.Array, *arguments: Any) -> Any:
        out, vjp = jax.vjp(forward, *arguments)
        return out, vjp(gradient)

    return both


def _program(
    forward: Callable[..., jax.Array], arguments: tuple, phase: str
) -> Callable[[], Any]:
    if phase == FORWARD:
        compiled = jax.jit(forward)
        return lambda: compiled(*arguments)
    out = jax.eval_shape(forward, *arguments)
    gradient = jax.random.normal(jax.random.key(7), out.shape, out.dtype)
    compiled = jax.jit(forward_and_backward(forward))
    return lambda: compiled(gradient, *arguments)

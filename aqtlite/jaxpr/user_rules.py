"""The rules that a function has for its gradient, as jaxprs.

`jax.custom_vjp` gives a function two rules: one for its outputs and residuals, one from
these and the gradients of the outputs to those of the inputs. Reverse-mode
differentiation makes the same two of the rule of a `jax.custom_jvp`. In the location of
an equation in them they are bodies of the call, after the function itself.
"""

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import equations, mapped, registry

FUNCTION, FORWARD, BACKWARD = range(3)
"""Numbers of the function and of its rules among the bodies of a call."""

CALLS: Mapping[str, str] = MappingProxyType(
    {
        primitives.custom_vjp_call_p.name: "jax.custom_vjp",
        primitives.custom_jvp_call_p.name: "jax.custom_jvp",
    }
)
"""Names of the primitives that call such functions, and of what made them."""

_ERRORS = (*mapped.OF_REFERENCES, NameError, RuntimeError)
"""Errors of rules that cannot be used: differentiation raises them where it needs the
rules, which a program that is not differentiated does not."""

_OF_CLOSED_OVER = "CustomVJPException"
"""Name of the error of a gradient with respect to what a `jax.custom_vjp` closes over;
JAX has no public name for it."""


@dataclasses.dataclass(frozen=True)
class UserRules:
    """The rules of one call, with regard to all inputs that have a gradient."""

    forward: core.ClosedJaxpr
    """From the inputs to the outputs and residuals."""

    backward: core.ClosedJaxpr
    """From the residuals and the gradients of floating outputs to the gradients of
    `differentiated`."""

    differentiated: tuple[int, ...]
    """Indices of the inputs with a gradient."""

    num_outputs: int

    num_closed_over: int
    """How many leading inputs the function closes over: its rules do not know them."""


_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")

_known: "weakref.WeakKeyDictionary[Any, UserRules | None]" = weakref.WeakKeyDictionary()


def of(eqn: Any) -> UserRules | None:
    """Returns the rules of a call.

    Args:
        eqn: equation of one of the primitives of `CALLS`.

    Returns:
        The rules; None if they raise an error, or if the function is one of JAX that
        contracts nothing, such as an activation.
    """
    (body,) = equations.bodies(eqn)
    if _is_of_jax(body) and not _contracts(body):
        return None
    # Calls of a function in `jax.jit`, such as an activation, share one body.
    if body.jaxpr not in _known:
        try:
            _known[body.jaxpr] = _traced(eqn, body)
        except _ERRORS:
            _known[body.jaxpr] = None
    return _known[body.jaxpr]


def _is_of_jax(body: core.ClosedJaxpr) -> bool:
    """Whether the source of a function is in JAX's folder."""
    _, _, place = str(body.jaxpr.debug_info.func_src_info).rpartition(" at ")
    return place.startswith(_FOLDER)


def _contracts(body: core.ClosedJaxpr) -> bool:
    names = (eqn.primitive.name for eqn in equations.with_bodies(body))
    return not registry.OF_PRIMITIVES.keys().isdisjoint(names)


def _traced(eqn: Any, body: core.ClosedJaxpr) -> UserRules:
    # `jax.vmap`, and tracing once more, make inputs like any other of what a function
    # closes over, and still refuse gradients with respect to it.
    first = equations.num_closed_over(eqn)
    floating = [
        i for i, x in enumerate(body.in_avals) if i >= first and _is_floating(x)
    ]
    while True:
        try:
            return _with_regard_to(floating, eqn, body, first)
        except Exception as error:
            if type(error).__name__ != _OF_CLOSED_OVER or not floating:
                raise
        first = floating.pop(0) + 1


def _with_regard_to(
    differentiated: Sequence[int],
    eqn: Any,
    body: core.ClosedJaxpr,
    num_closed_over: int,
) -> UserRules:
    """Traces the rules with regard to some inputs."""
    structures: list[Any] = []

    def forward(*values: Any) -> tuple[list[Any], list[Any]]:
        def of_some(*some: Any) -> list[Any]:
            given = dict(zip(differentiated, some, strict=True))
            every = [given.get(i, value) for i, value in enumerate(values)]
            return equations.evaluate(body.jaxpr, eqn, every)

        outputs, pull_back = jax.vjp(of_some, *(values[i] for i in differentiated))
        residuals, structure = jax.tree.flatten(pull_back)
        structures.append(structure)
        return outputs, residuals

    def backward(residuals: Sequence[Any], gradients: Sequence[Any]) -> Any:
        pull_back = jax.tree.unflatten(structures[-1], residuals)
        given = iter(gradients)
        return pull_back(
            [
                next(given)
                if _is_floating(aval)
                else np.zeros(aval.shape, jax.dtypes.float0)
                for aval in body.out_avals
            ]
        )

    made = jax.make_jaxpr(forward)(*body.in_avals)
    count = len(body.out_avals)
    of_outputs = [aval for aval in body.out_avals if _is_floating(aval)]
    residuals = list(made.out_avals[count:])
    of_rule = jax.make_jaxpr(backward)(residuals, of_outputs)
    return UserRules(made, of_rule, tuple(differentiated), count, num_closed_over)


def _is_floating(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))

"""Functions that are differentiated by the rules of other functions.

The rules are those that `jax.custom_jvp` or `jax.custom_vjp` gave an original. What
takes the original's place computes other outputs from these inputs and from further
arrays, and returns auxiliary ones beside the outputs; neither has a derivative.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Original = Callable[..., Sequence[Any]]
"""Takes arrays, and returns a list of arrays."""

Replaced = Callable[..., tuple[Sequence[Any], Any]]
"""Takes what is given, then arrays; returns a list of arrays, and auxiliary ones."""


def with_jvp_of(original: Original, run: Replaced, symbolic_zeros: bool) -> Replaced:
    """Gives a function the derivative of another one.

    Args:
        original: function with a rule from `jax.custom_jvp`.
        run: function in place of the original.
        symbolic_zeros: the rule takes them.
    """

    @jax.custom_jvp
    def function(given, *values):
        return run(given, *values)

    def rule(primals, tangents):
        outputs, aux = run(*primals)
        values, of_values = primals[1:], tangents[1:]
        which = [not _is_symbolic_zero(tangent) for tangent in of_values]
        of_original, of_outputs = jax.jvp(
            _of_some(original, values, which),
            list(itertools.compress(values, which)),
            list(itertools.compress(of_values, which)),
        )
        outputs = list(map(_with_derivative_of, of_original, outputs))
        return (outputs, aux), (of_outputs, jax.tree.map(_no_tangent, aux))

    function.defjvp(rule, symbolic_zeros=symbolic_zeros)
    return function


def _no_tangent(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def with_vjp_of(
    original: Original, run: Replaced, num_consts: int, symbolic_zeros: bool
) -> Replaced:
    """Gives a function the gradients of another one.

    Args:
        original: function with rules from `jax.custom_vjp`.
        run: function in place of the original.
        num_consts: number of arrays, the first ones, that the original closes over:
            its rules know nothing of them.
        symbolic_zeros: the rules take them. Which inputs are perturbed they are told;
            gradients of outputs they get as arrays.
    """

    @jax.custom_vjp
    def function(given, *values):
        return run(given, *values)

    def forward(given, *values):
        which = [True] * len(values)
        if symbolic_zeros:
            which = [one.perturbed for one in values]
            given, values = jax.tree.map(lambda one: one.value, (given, values))
        which[:num_consts] = [False] * num_consts
        of_original, pull_back = jax.vjp(
            _of_some(original, values, which), *itertools.compress(values, which)
        )
        outputs, aux = run(given, *values)
        outputs = list(map(_with_derivative_of, of_original, outputs))
        # Which they are is told by a structure, which stays static.
        residuals = pull_back, [() if one else None for one in which]
        return (outputs, aux), residuals

    def backward(residuals, gradients):
        pull_back, which = residuals
        found = iter(pull_back(list(map(_as_array, gradients[0]))))
        return None, *(None if one is None else next(found) for one in which)

    function.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)

    def with_constants(given, *values):
        constants = map(_undifferentiated, values[:num_consts])
        return function(given, *constants, *values[num_consts:])

    return with_constants


def _with_derivative_of(one: Any, value: Any) -> Any:
    """A value that has the derivative of another one: further ones are the rules'."""
    return _valued(one, value) if jnp.issubdtype(value.dtype, jnp.inexact) else value


@jax.custom_jvp
def _valued(one: Any, value: Any) -> Any:
    del one
    return value


@_valued.defjvp
def _valued_jvp(primals: Any, tangents: Any) -> Any:
    return _valued(*primals), tangents[0]


def _of_some(
    function: Callable[..., Any], values: Sequence[Any], which: Sequence[bool]
) -> Callable[..., Any]:
    """A function of some arguments of another, the rest fixed to those of `values`."""

    def of_some(*some: Any) -> Any:
        rest = iter(some)
        return function(
            *(next(rest) if one else x for x, one in zip(values, which, strict=True))
        )

    return of_some


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _as_array(gradient: Any) -> Any:
    if not _is_symbolic_zero(gradient):
        return gradient
    make = np.zeros if gradient.dtype == jax.dtypes.float0 else jnp.zeros
    return make(gradient.shape, gradient.dtype)


@jax.custom_jvp
def _undifferentiated(x: Any) -> Any:
    return x


@_undifferentiated.defjvp
def _undifferentiated_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise ValueError(
        "a jax.custom_vjp function is differentiated with respect to a value that it "
        "closes over, of which its rules know nothing: pass it as an argument"
    )

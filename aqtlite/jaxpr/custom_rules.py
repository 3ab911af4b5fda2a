"""Differentiates a function by the custom rules of another function.

The rules are those of an original with `jax.custom_jvp` or `jax.custom_vjp`, as they
are or with contractions in them replaced. Its replacement computes other outputs from
the same inputs and further given arrays, and also returns auxiliary arrays; given and
auxiliary arrays have no derivative.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

Original = Callable[..., Sequence[Any]]
"""Function from arrays to a list of arrays."""

Beside = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Transformation of a function."""

Replaced = Callable[..., tuple[Sequence[Any], Any]]
"""Function from given arrays and inputs to a list of outputs and auxiliary arrays."""


def with_jvp_of(
    original: Original, run: Replaced, beside: Beside, symbolic_zeros: bool
) -> Replaced:
    """Gives a function the derivative of another one.

    Args:
        original: function with a rule from `jax.custom_jvp`.
        run: function in place of the original.
        beside: transformation of what the rule computes from the inputs.
        symbolic_zeros: whether the rule takes symbolic zeros.
    """

    @jax.custom_jvp
    def function(given, *values):
        return run(given, *values)

    def rule(primals, tangents):
        outputs, aux = run(*primals)
        values, of_values = primals[1:], tangents[1:]
        which = [not _is_symbolic_zero(tangent) for tangent in of_values]
        linearize = functools.partial(jax.linearize, _of_some(original, values, which))
        of_original, derivative = beside(linearize)(*itertools.compress(values, which))
        of_outputs = derivative(*itertools.compress(of_values, which))
        outputs = list(map(_with_derivative_of, of_original, outputs))
        return (outputs, aux), (of_outputs, jax.tree.map(_no_tangent, aux))

    function.defjvp(rule, symbolic_zeros=symbolic_zeros)
    return function


def _no_tangent(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def with_vjp_of(
    original: Original, run: Replaced, beside: Beside, num_consts: int
) -> Replaced:
    """Gives a function the gradients of another one.

    Args:
        original: function with rules from `jax.custom_vjp`.
        run: function in place of the original.
        beside: transformation of what the rules compute from the inputs.
        num_consts: number of leading inputs that the original closes over; its rules
            do not know them. (Under `jax.vmap`, arrays that it closes over may be
            further inputs, which must not be perturbed.)
    """

    @jax.custom_vjp
    def function(given, *values):
        return run(given, *values)

    # Rules that take symbolic zeros are told which inputs are perturbed, but get
    # gradients of outputs as arrays.
    def forward(given, *values):
        which = [one.perturbed for one in values]
        given, values = jax.tree.map(lambda one: one.value, (given, values))
        which[:num_consts] = [False] * num_consts
        differentiate = functools.partial(jax.vjp, _of_some(original, values, which))
        of_original, pull_back = beside(differentiate)(
            *itertools.compress(values, which)
        )
        outputs, aux = run(given, *values)
        outputs = list(map(_with_derivative_of, of_original, outputs))
        # A pytree structure keeps `which` static.
        residuals = pull_back, [() if one else None for one in which]
        return (outputs, aux), residuals

    def backward(residuals, gradients):
        pull_back, which = residuals
        found = iter(pull_back(list(map(_as_array, gradients[0]))))
        return None, *(None if one is None else next(found) for one in which)

    function.defvjp(forward, backward, symbolic_zeros=True)

    def with_constants(given, *values):
        constants = map(_undifferentiated, values[:num_consts])
        return function(given, *constants, *values[num_consts:])

    return with_constants


class Rules(NamedTuple):
    """Rules in place of those of an original."""

    forward: Callable[[Any, Sequence[Any]], Sequence[Any]]
    """From given arrays and inputs to the outputs and residuals."""

    backward: Callable[[Any, Sequence[Any]], Sequence[Any]]
    """From given arrays, residuals and the gradients of floating outputs to the
    gradients of `differentiated`."""

    differentiated: tuple[int, ...]
    """Indices of the inputs with a gradient."""


def with_rules(run: Replaced, rules: Rules) -> Replaced:
    """Gives a function rules for its gradient.

    Args:
        run: the function.
        rules: the rules, which are given the same arrays.
    """

    @jax.custom_vjp
    def function(given, *values):
        return run(given, *values)

    def forward(given, *values):
        perturbed = (i for i, one in enumerate(values) if one.perturbed)
        if not set(perturbed) <= {*rules.differentiated}:
            _refuse_closed_over()
        given, values = jax.tree.map(lambda one: one.value, (given, values))
        outputs, aux = run(given, *values)
        found = rules.forward(given, values)
        count = len(outputs)
        outputs = list(map(_with_derivative_of, found[:count], outputs))
        return (outputs, aux), (given, list(found[count:]), len(values) * [()])

    def backward(saved, gradients):
        given, residuals, inputs = saved
        of_outputs = [
            _as_array(one) for one in gradients[0] if one.dtype != jax.dtypes.float0
        ]
        found = rules.backward(given, [*residuals, *of_outputs])
        by_input = dict(zip(rules.differentiated, found, strict=True))
        return None, *(by_input.get(i) for i in range(len(inputs)))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _with_derivative_of(one: Any, value: Any) -> Any:
    """Returns `value` with the derivative of `one`, for higher-order derivatives."""
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
    """Returns a function of some arguments, with the others fixed to `values`."""

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
    _refuse_closed_over()


def _refuse_closed_over() -> NoReturn:
    raise ValueError(
        "a jax.custom_vjp function is differentiated with respect to a value that it "
        "closes over, of which its rules know nothing: pass it as an argument"
    )

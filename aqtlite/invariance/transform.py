"""Functions whose results depend on values alone, bit for bit."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite.contraction.differentiation import SCOPE
from aqtlite.invariance import rules
from aqtlite.jaxpr import equations, registry, rewriting, scopes, tracing
from aqtlite.jaxpr.replacement import Location, Replacement

F = TypeVar("F", bound=Callable[..., Any])


def invariant(fn: F) -> F:
    """Returns a function that computes each result from values alone, bit for bit.

    Float arithmetic on a processor depends on the program around it: on the size of a
    batch, the length of a sequence or a cache, on padding, on the gradient that is
    computed beside a result, on the instructions that the processor has, and on the
    version of XLA. The result of this function does not. Sums are added in an order by
    distances modulo powers of two, products are rounded before they are added to
    anything, exponentials and other functions are written out, and 16-bit results are
    rounded where the program says so. Contractions of floats add their products one by
    one, which is slow for large ones: quantize these, since sums of integers are exact
    in any order.

    The derivative is that of `fn`. Bits of gradients depend on values alone if the
    function that computes them is given: ``invariant(jax.grad(loss))``.

    >>> import jax
    >>> x = jax.random.normal(jax.random.key(0), (8, 100))
    >>> softmax = invariant(jax.nn.softmax)
    >>> whole = jax.jit(softmax)(x)
    >>> bool((jax.jit(softmax)(x[3:4]) == whole[3:4]).all())
    True

    Args:
        fn: function of pytrees of arrays. It is traced at every call, so call the
            result inside a `jax.jit`.

    Returns:
        The function. Where `fn` has an operation without such a form, it raises a
        `ValueError` that names the operation and its name scope: convolutions and
        `ragged_dot` of floats, windowed sums, cumulative products, linear algebra,
        collective operations, float64 and complex numbers, and functions other than
        exp, log, pow, tanh, logistic, erf, sin, cos, sqrt and their variants.
    """

    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:
        traced = tracing.trace(lambda args, kwargs: fn(*args, **kwargs), (args, kwargs))
        outputs = evaluate(traced.jaxpr, traced.values((args, kwargs)))
        return jax.tree.map(lambda i: jnp.asarray(outputs[i]), traced.outputs)

    return function  # type: ignore[return-value]


def evaluate(closed: core.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Evaluates a program in forms whose bits depend on values alone.

    Args:
        closed: the program.
        values: its inputs.

    Raises:
        ValueError: if an operation has no such form.
    """
    replacements: dict[Location, Replacement] = {}
    refused = []
    for one in _equations(closed, _Place((), "", 0)):
        try:
            rule = rules.rule_of(one.eqn)
            if rule is not None and one.is_in_condition:
                raise rules.NoForm(
                    f"{one.eqn.primitive.name} in the condition of a while loop has no "
                    "such form: compute it in the body, and carry the result"
                )
        except rules.NoForm as error:
            refused.append(f"  {scopes.parse(one.scope).path or '(no scope)'}: {error}")
            continue
        if rule is not None and not one.is_rounded_already:
            replacements[one.location] = Replacement(
                functools.partial(_evaluated, rule, one.eqn),
                per_step=(False,) * one.num_scans,
            )
    if refused:
        raise ValueError(
            "operations whose bits depend on more than values:\n"
            + "\n".join(dict.fromkeys(refused))
        )
    return rewriting.evaluate(closed, values, replacements)[0]


def _evaluated(
    rule: rules.Rule, eqn: Any, values: Sequence[Any], given: Any
) -> tuple[list[jax.Array], None]:
    del given
    return rules.apply(rule, eqn, values), None


_ROUNDED_IN_CONTRACTIONS = frozenset(
    {"add", "add_any", "convert_element_type", "div", "integer_pow", "mul", "square"}
    | {"sqrt", "sub"}
)
"""Primitives that a quantized contraction calls in forms of its own."""


class _Place(NamedTuple):
    """Where a jaxpr is in a program."""

    location: Location
    scope: str
    num_scans: int
    is_in_condition: bool = False


class _Equation(NamedTuple):
    """An equation that is no call, loop or branch."""

    eqn: Any
    location: Location
    scope: str
    num_scans: int
    is_in_condition: bool

    @property
    def is_rounded_already(self) -> bool:
        """Whether it is part of a quantized contraction, in a form with one result."""
        is_known = self.eqn.primitive.name in _ROUNDED_IN_CONTRACTIONS
        return is_known and SCOPE in scopes.parse(self.scope).path.split("/")


def _equations(closed: core.ClosedJaxpr, place: _Place) -> Iterator[_Equation]:
    for number, eqn in enumerate(closed.jaxpr.eqns):
        scope = scopes.join(place.scope, scopes.text_of(eqn))
        bodies = _bodies(eqn)
        if not bodies:
            location = (*place.location, (number, 0))
            yield _Equation(
                eqn, location, scope, place.num_scans, place.is_in_condition
            )
        kind = eqn.primitive.name
        for index, body in enumerate(bodies):
            yield from _equations(
                body,
                _Place(
                    (*place.location, (number, index)),
                    scope,
                    place.num_scans + (kind == "scan"),
                    place.is_in_condition or (kind == "while" and index == 0),
                ),
            )


def _bodies(eqn: Any) -> list[core.ClosedJaxpr]:
    """Returns the bodies of an equation whose equations can be replaced."""
    name = registry.name_of(eqn)
    if name is not None:
        return [registry.body_of(eqn, name)]
    return list(equations.bodies(eqn)) if rewriting.enters(eqn) else []

"""Evaluation of a function whose results depend on values alone."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite.contraction.differentiation import SCOPE
from aqtlite.invariance import rules
from aqtlite.jaxpr import equations, registry, rewriting, scopes, tracing
from aqtlite.jaxpr.replacement import Location, Replacement

F = TypeVar("F", bound=Callable[..., Any])


def invariant(fn: F) -> F:
    """Returns a function with results whose bits depend on values alone."""

    @functools.wraps(fn)
    def function(*args, **kwargs):
        traced = tracing.trace(lambda args, kwargs: fn(*args, **kwargs), (args, kwargs))
        outputs = evaluate(traced.jaxpr, traced.values((args, kwargs)))
        return jax.tree.map(lambda i: jnp.asarray(outputs[i]), traced.outputs)

    return function


def evaluate(closed: core.ClosedJaxpr, values: list[Any]) -> list[Any]:
    """Evaluates a program."""
    replacements, refused = {}, []
    for location, eqn, scope, scans in _equations(closed, (), "", 0):
        try:
            rule = rules.rule_of(eqn)
        except NotImplementedError as error:
            refused.append(
                f"{error} at {scopes.parse(scope).path or '(no name scope)'}"
            )
            continue
        if rule is None or (_is_ours(scope) and eqn.primitive.name in _OURS):
            continue
        replacements[location] = Replacement(
            functools.partial(_replaced, rule, eqn), per_step=(False,) * scans
        )
    if refused:
        raise ValueError(f"no form: {refused}")
    return rewriting.evaluate(closed, values, replacements)[0]


_OURS = frozenset(
    {
        "mul",
        "div",
        "add",
        "sub",
        "convert_element_type",
        "add_any",
        "sqrt",
        "integer_pow",
        "square",
    }
)


def _is_ours(scope):
    return SCOPE in scopes.parse(scope).path.split("/")


def _replaced(rule, eqn, values, given):
    del given
    return rules.apply(rule, eqn, values), None


def _equations(
    closed: core.ClosedJaxpr, prefix: Location, scope: str, scans: int
) -> Iterator[tuple[Location, Any, str, int]]:
    for number, eqn in enumerate(closed.jaxpr.eqns):
        inner = scopes.join(scope, scopes.text_of(eqn))
        name = registry.name_of(eqn)
        if rewriting.enters(eqn) or name is not None:
            bodies = [registry.body_of(eqn, name)] if name else equations.bodies(eqn)
            for index, body in enumerate(bodies):
                if eqn.primitive.name == "while" and index == 0:
                    continue
                yield from _equations(
                    body,
                    (*prefix, (number, index)),
                    inner,
                    scans + (eqn.primitive.name == "scan"),
                )
        else:
            yield (*prefix, (number, 0)), eqn, inner, scans

"""Runs of equations that repeat in a jaxpr, as they do in a model of equal layers.

JAX traces and differentiates a `jax.jit` once for all its calls. Equal runs are calls
of one, which is inlined (`inlined.traced_once`): the program stays the same.
"""

import collections
import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from aqtlite.jaxpr import equations, inlined, scopes

_MIN_EQUATIONS = 4
"""Equations of the shortest run that is faster to share than to evaluate."""

Run = Callable[..., list[Any]]
"""Function of the inputs of a run of equations to its outputs."""


def functions(runs: Sequence[Any]) -> list[Run]:
    """Returns each run as a function. Runs that differ in their scopes alone share one.

    Args:
        runs: jaxprs of consecutive equations, without constants.
    """
    repeatable = [_repeatable(run) for run in runs]
    counts = collections.Counter(one.key for one in repeatable if one is not None)
    shared: dict[Hashable, Run] = {}
    made: list[Run] = []
    for run, one in zip(runs, repeatable, strict=True):
        if one is None or counts[one.key] == 1:
            made.append(core.jaxpr_as_fun(core.ClosedJaxpr(run, ())))
            continue
        if one.key not in shared:
            body = core.jaxpr_as_fun(core.ClosedJaxpr(one.jaxpr, ()))
            shared[one.key] = inlined.traced_once(body)
        made.append(_in_scope(one.scope, shared[one.key]))
    return made


class _Repeatable(NamedTuple):
    """A run of equations that others may be equal to."""

    scope: str
    """Scope that its equations share."""

    jaxpr: Any
    """Run with scopes relative to the shared one."""

    key: Hashable
    """Value in common with equal runs."""


def _repeatable(run: Any) -> _Repeatable | None:
    """Returns None for a run that is not to be shared."""
    if len(run.eqns) < _MIN_EQUATIONS or run.effects:
        return None
    scope, jaxpr = scopes.relative(run)
    key = _key(jaxpr)
    try:
        hash(key)
    except TypeError:  # A parameter has no hash.
        return None
    return _Repeatable(scope, jaxpr, key)


def _in_scope(scope: str, run: Run) -> Run:
    def function(*values: Any) -> list[Any]:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return run(*values)

    return function


def _key(run: Any) -> Hashable:
    """Returns what equal runs have in common; it has a hash if all parameters have."""
    numbers: dict[Any, int] = {}

    def number(atom: Any) -> Hashable:
        if isinstance(atom, core.Literal):
            value = np.asarray(equations.literal_value(atom))
            return atom.aval, value.tobytes()
        return numbers.setdefault(atom, len(numbers))

    return (
        tuple((number(var), var.aval) for var in run.invars),
        tuple(
            (
                eqn.primitive,
                tuple(map(number, eqn.invars)),
                tuple((number(var), var.aval) for var in eqn.outvars),
                tuple(eqn.params.items()),
                eqn.ctx,
                scopes.text_of(eqn),
            )
            for eqn in run.eqns
        ),
        tuple(map(number, run.outvars)),
    )

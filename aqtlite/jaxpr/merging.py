"""Equations of a jaxpr that compute what an earlier one has computed."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
from jax.extend import core

from aqtlite.jaxpr import equations
from aqtlite.jaxpr.replacement import Location


@dataclasses.dataclass(frozen=True)
class Merged:
    """A jaxpr whose equal equations are read at the first of them."""

    closed: core.ClosedJaxpr
    """The jaxpr. Its equations are where they were."""

    unread: frozenset[Location]
    """Locations of equations that nothing reads any more."""


def merged(closed: core.ClosedJaxpr, but: Collection[Location] = ()) -> Merged:
    """Reads the results of equal equations at the first of them.

    XLA does so, too, after it has read the operations of all. Equations with bodies
    or effects stay as they are, and so do those inside bodies: what is computed again
    in a `jax.checkpoint` is meant to be.

    >>> import jax
    >>> f = lambda x, y: jax.numpy.sin(x * y) + jax.numpy.sin(x * y)
    >>> sorted(merged(jax.make_jaxpr(f)(0.0, 0.0)).unread)
    [((2, 0),), ((3, 0),)]

    Args:
        closed: the jaxpr.
        but: locations of equations to leave as they are.
    """
    first: dict[Any, Any] = {}
    instead: dict[Any, Any] = {}
    eqns, unread = [], set()

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else instead.get(atom, atom)

    for number, eqn in enumerate(closed.jaxpr.eqns):
        eqn = eqn.replace(invars=[*map(read, eqn.invars)])
        eqns.append(eqn)
        location = ((number, 0),)
        if location in but or eqn.effects or any(True for _ in equations.bodies(eqn)):
            continue
        try:
            same = first.setdefault(_key(eqn), eqn)
        except TypeError:  # A parameter has no hash.
            continue
        if same is not eqn:
            instead.update(zip(eqn.outvars, same.outvars, strict=True))
            unread.add(location)
    outvars = [*map(read, closed.jaxpr.outvars)]
    jaxpr = closed.jaxpr.replace(eqns=eqns, outvars=outvars)
    return Merged(core.ClosedJaxpr(jaxpr, closed.consts), frozenset(unread))


def _key(eqn: Any) -> Any:
    """Returns what equal equations have in common."""
    types = tuple(var.aval for var in eqn.outvars)
    inputs = tuple(map(_identity, eqn.invars))
    return eqn.primitive, tuple(sorted(eqn.params.items())), inputs, types, eqn.ctx


def _identity(atom: Any) -> Any:
    if not isinstance(atom, core.Literal):
        return atom
    return atom.aval, np.asarray(equations.literal_value(atom)).tobytes()

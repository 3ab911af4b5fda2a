"""Biases: inputs of a jaxpr that are added to the result of an equation."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite.jaxpr import equations
from aqtlite.jaxpr.replacement import Location
from aqtlite.shapes.sharding import with_sharding_of

_MOVING = {"reshape", "transpose", "squeeze", "copy", "name", "sharding_constraint"}
"""Primitives between a result and the sum that keep all elements."""

_CASTS = {"convert_element_type", "reduce_precision"}

_SUMS = {"add", "add_any"}


@dataclasses.dataclass(frozen=True)
class Bias:
    """An input that is added to a result."""

    input: int
    """Index of the input of the jaxpr."""

    of_result: tuple[Any, ...]
    """Equations that lay out the result as the sum, each of one input; with the jaxprs
    that they are in."""

    of_input: tuple[Any, ...]
    """The same for the bias; these broadcast it."""

    shape: tuple[int, ...]
    """Shape of the input."""

    def sums(self, result: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sums a result over the elements that share one of the bias.

        Args:
            result: array of the shape of the result, float32.

        Returns:
            The sums, and the numbers of elements; float32, of the shape of the bias.
        """
        laid_out = _evaluate(self.of_result, result)
        zeros = jnp.zeros(self.shape, jnp.float32)

        def broadcast(bias: jax.Array) -> jax.Array:
            # The sum itself may broadcast axes of size 1.
            out = jnp.broadcast_to(_evaluate(self.of_input, bias), laid_out.shape)
            return with_sharding_of(laid_out, out)

        _, of_bias = jax.vjp(broadcast, zeros)
        ones = with_sharding_of(laid_out, jnp.ones_like(laid_out))
        (total,), (count,) = of_bias(laid_out), of_bias(ones)
        return total, count


def _evaluate(steps: Sequence[Any], value: jax.Array) -> jax.Array:
    for jaxpr, eqn in steps:
        (value,) = equations.evaluate(jaxpr, eqn, [value])
    return value


@dataclasses.dataclass(frozen=True)
class _Level:
    """A jaxpr, and the call in it whose body is the next level."""

    jaxpr: Any
    call: Any = None


def find(closed: core.ClosedJaxpr, location: Location) -> Bias | None:
    """Returns the bias of the first result of an equation.

    Nothing but the sum may read the result. Calls (`jax.jit`, `jax.checkpoint`) are
    followed, loops and branches are not.

    >>> def layer(params, x):
    ...     return x @ params["w"] + params["b"]
    >>> params = {"b": jnp.zeros(3), "w": jnp.zeros((2, 3))}
    >>> closed = jax.make_jaxpr(layer)(params, jnp.zeros((5, 2)))
    >>> bias = find(closed, ((0, 0),))
    >>> total, count = bias.sums(jnp.full((5, 3), 2.0))
    >>> bias.input, total.tolist(), count.tolist()
    (0, [10.0, 10.0, 10.0], [5.0, 5.0, 5.0])

    Args:
        closed: the jaxpr.
        location: location of the equation.

    Returns:
        The bias; None if no input is added to the result, or in a loop or branch.
    """
    levels, jaxpr = [], closed.jaxpr
    *calls, (index, _) = location
    for number, _ in calls:
        call = jaxpr.eqns[number]
        body = equations.called_body(call)
        if body is None:
            return None
        levels.append(_Level(jaxpr, call))
        jaxpr = body.jaxpr
    levels.append(_Level(jaxpr))
    steps: list[Any] = []
    var: Any = jaxpr.eqns[index].outvars[0]
    while True:
        jaxpr = levels[-1].jaxpr
        readers = [(eqn, i) for eqn in jaxpr.eqns for i in _places(eqn.invars, var)]
        leaving = list(_places(jaxpr.outvars, var))
        if len(readers) + len(leaving) != 1:
            return None
        if leaving:
            levels.pop()
            if not levels:
                return None
            var = levels[-1].call.outvars[leaving[0]]
            continue
        ((eqn, place),) = readers
        name, body = eqn.primitive.name, equations.called_body(eqn)
        if name in _SUMS:
            if eqn.outvars[0].aval.shape != var.aval.shape:
                return None
            return _from_input(levels, eqn.invars[1 - place], steps)
        if body is not None:
            levels[-1:] = [_Level(jaxpr, eqn), _Level(body.jaxpr)]
            var = body.jaxpr.invars[place]
        elif name in _MOVING | _CASTS and len(eqn.invars) == 1:
            if name in _MOVING:
                steps.append((jaxpr, eqn))
            var = eqn.outvars[0]
        else:
            return None


def count_reads(closed: core.ClosedJaxpr, number: int) -> int:
    """Returns how many equations and results read an input, those in calls counted."""
    return _reads(closed.jaxpr, closed.jaxpr.invars[number])


def _reads(jaxpr: Any, var: Any) -> int:
    count = len(list(_places(jaxpr.outvars, var)))
    for eqn in jaxpr.eqns:
        for place in _places(eqn.invars, var):
            body = equations.called_body(eqn)
            if body is None:
                count += 1
            else:
                count += _reads(body.jaxpr, body.jaxpr.invars[place])
    return count


def _from_input(levels: list[_Level], atom: Any, of_result: list[Any]) -> Bias | None:
    """Follows a value back to the input that it is made of, if that is one."""
    levels = list(levels)
    steps: list[Any] = []
    while not isinstance(atom, core.Literal):
        jaxpr = levels[-1].jaxpr
        for place in _places(jaxpr.invars, atom):
            levels.pop()
            if not levels:
                made = tuple(reversed(steps))
                return Bias(place, tuple(of_result), made, tuple(atom.aval.shape))
            atom = levels[-1].call.invars[place]
            break
        else:
            made_by = [(e, i) for e in jaxpr.eqns for i in _places(e.outvars, atom)]
            if not made_by:
                return None  # A constant.
            ((eqn, place),) = made_by
            name, body = eqn.primitive.name, equations.called_body(eqn)
            if body is not None:
                levels[-1:] = [_Level(jaxpr, eqn), _Level(body.jaxpr)]
                atom = body.jaxpr.outvars[place]
                continue
            if name not in _MOVING | _CASTS | {"broadcast_in_dim"}:
                return None
            if len(eqn.invars) != 1:
                return None
            if name not in _CASTS:
                steps.append((jaxpr, eqn))
            atom = eqn.invars[0]
    return None


def _places(atoms: Sequence[Any], wanted: Any) -> Iterator[int]:
    return (i for i, atom in enumerate(atoms) if atom is wanted)

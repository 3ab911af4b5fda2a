"""Where the values of a jaxpr come from: from an equation back to those before it.

Calls are entered, and left for the values that their callers pass.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import equations, registry
from aqtlite.jaxpr.replacement import Location
from aqtlite.shapes import processes


class Body:
    """A jaxpr, in the place of a program where it runs."""

    def __init__(
        self, closed: core.ClosedJaxpr, eqn: Any = None, outer: "Body | None" = None
    ):
        """Takes a jaxpr.

        Args:
            closed: the jaxpr.
            eqn: the equation whose body it is; None for the whole program.
            outer: the body with that equation.
        """
        self.closed, self.eqn, self.outer = closed, eqn, outer
        self.makers: dict[Any, tuple[Any, int]] = {
            var: (made_by, number)
            for made_by in closed.jaxpr.eqns
            for number, var in enumerate(made_by.outvars)
        }
        """For each variable that an equation makes: the equation, and which output."""
        self._inner: dict[tuple[int, int], Body] = {}

    def inside(self, eqn: Any, number: int = 0) -> "Body":
        """Returns a body of one of the equations.

        Args:
            eqn: the equation.
            number: index among its bodies.
        """
        key = id(eqn), number
        if key not in self._inner:
            closed = list(equations.bodies(eqn))[number]
            self._inner[key] = Body(closed, eqn, self)
        return self._inner[key]


class Value(NamedTuple):
    """A variable or a literal of a body."""

    atom: Any
    body: Body

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.atom.aval.shape)

    @property
    def constant(self) -> Any:
        """Its array, if it is a literal or a constant of its jaxpr; None if not."""
        if isinstance(self.atom, core.Literal):
            return equations.literal_value(self.atom)
        closed = self.body.closed
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if var is self.atom:
                return value if processes.is_readable(value) else None
        return None

    @property
    def maker(self) -> Any:
        """The equation that makes it; None if none of its body does."""
        if isinstance(self.atom, core.Literal):
            return None
        return self.body.makers.get(self.atom, (None, 0))[0]

    @property
    def inputs(self) -> list["Value"]:
        """The inputs of its maker, each as `source`."""
        return [source(Value(atom, self.body)) for atom in self.maker.invars]


def operands(program: Body, location: Location) -> list[Value] | None:
    """Returns the inputs of an equation, each as `source`.

    Args:
        program: the whole program.
        location: location of the equation.

    Returns:
        The values; None in the reference of a registered operation.
    """
    body = program
    for index, number in location[:-1]:
        eqn = body.closed.jaxpr.eqns[index]
        if registry.name_of(eqn) is not None:
            return None
        body = body.inside(eqn, number)
    index, _ = location[-1]
    return [source(Value(atom, body)) for atom in body.closed.jaxpr.eqns[index].invars]


def source(value: Value) -> Value:
    """Returns the value that calls pass on unchanged as this one.

    It is a constant, is made by an equation that is no call, or is an input of which no
    more is known.
    """
    while True:
        before = _passed_on(value)
        if before is None:
            return value
        value = before


def _passed_on(value: Value) -> Value | None:
    """Returns the value of another body that this one is; None if it is of its own."""
    atom, body = value
    if isinstance(atom, core.Literal):
        return None
    if atom in body.makers:
        eqn, number = body.makers[atom]
        called = equations.called_body(eqn)
        if called is None:
            return None
        return Value(called.jaxpr.outvars[number], body.inside(eqn))
    if body.outer is None or atom not in body.closed.jaxpr.invars:
        return None
    index = body.closed.jaxpr.invars.index(atom)
    given = _given(body.eqn)
    return Value(given[index], body.outer) if index < len(given) else None


def _given(eqn: Any) -> list[Any]:
    """Returns the inputs of an equation that its bodies have as their first ones."""
    if equations.called_body(eqn) is not None:
        return list(eqn.invars)
    if eqn.primitive is primitives.scan_p:
        consts, _, _ = equations.Scan.of(eqn).of_inputs(eqn.invars)
        return consts
    if eqn.primitive is primitives.cond_p:
        return list(eqn.invars[1:])
    return []


_LARGEST = 2**22
"""Number of elements up to which values are computed."""


def computed(value: Value) -> np.ndarray | None:
    """Computes a value that is made of constants.

    Returns:
        The array; None if it depends on an input, or if it or a value that it is made
        of has more than 4 million elements.
    """
    with jax.ensure_compile_time_eval():
        found = _computed(value, steps=iter(range(200)))
    return None if found is None else np.asarray(found)


def _computed(value: Value, steps: Iterator[int]) -> Any:
    """Computes a value, if no more equations are needed than there are steps."""
    size = math.prod(value.shape)
    if not isinstance(size, int) or size > _LARGEST:
        return None
    if value.constant is not None or value.maker is None:
        return value.constant
    if next(steps, None) is None or value.maker.effects:
        return None
    inputs = []
    for one in value.inputs:
        array = _computed(one, steps)
        if array is None:
            return None
        inputs.append(array)
    outputs = [value.atom]
    (made,) = equations.evaluate(value.body.closed.jaxpr, value.maker, inputs, outputs)
    return made

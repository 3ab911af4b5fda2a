"""A jaxpr as one compiled function that returns all of its values.

Calls are entered; loops and branches are not.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import equations, scopes
from aqtlite.jaxpr.replacement import Location
from aqtlite.shapes.sharding import shape_of

# Half the time, with other last bits, where code that runs twice is compiled with a
# thousand outputs.
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A constant or a literal of a jaxpr."""

    value: Any


Read = int | Constant
"""What an equation reads: the number of a value, or a constant."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation with the values that it reads and makes."""

    eqn: Any
    location: Location
    scope: str
    """Its scope and those of the calls around it, as JAX writes them."""

    inputs: tuple[Read, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TracedValues:
    """A jaxpr and its values, numbered: first its inputs, then what equations make."""

    run: Callable[..., list[Any]]
    """Compiled function from the inputs to all values."""

    every: Callable[..., list[Any]]
    """The function, not compiled."""

    equations: tuple[Equation, ...]
    outputs: tuple[Read, ...]

    @classmethod
    def of(
        cls,
        closed: core.ClosedJaxpr,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> "TracedValues":
        """Traces a jaxpr.

        Args:
            closed: the jaxpr.
            compiler_options: those of `jax.jit`.
        """
        made: list[Equation] = []
        outputs: list[Read] = []

        def run(*inputs: Any) -> list[Any]:
            values = list(inputs)
            numbers = range(len(values))
            outputs[:] = _evaluate(closed, numbers, (), "", values, made)
            return values

        flat = jax.make_jaxpr(run)(*map(shape_of, closed.in_avals))
        every = core.jaxpr_as_fun(flat)
        options = None if compiler_options is None else dict(compiler_options)
        compiled = jax.jit(every, compiler_options=options)
        return cls(compiled, every, tuple(made), tuple(outputs))


def _evaluate(
    closed: core.ClosedJaxpr,
    inputs: Sequence[Read],
    around: Location,
    scope: str,
    values: list[Any],
    made: list[Equation],
) -> list[Read]:
    """Evaluates a jaxpr; returns what its outputs are.

    Args:
        closed: the jaxpr.
        inputs: what its inputs are.
        around: location of the call around it.
        scope: scope of the call around it.
        values: all values, to which those of its equations are added.
        made: the equations, to which its own are added.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, Read] = dict(
        zip(jaxpr.constvars, map(Constant, closed.consts), strict=True)
    )
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Read:
        if isinstance(atom, core.Literal):
            return Constant(equations.literal_value(atom))
        return known[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        reads = [read(atom) for atom in eqn.invars]
        location = (*around, (index, 0))
        text = scopes.text_of(eqn)
        there = scopes.join(scope, text)
        body = equations.called_body(eqn)
        if body is not None:
            with jax.named_scope(text) if text else contextlib.nullcontext():
                outputs = _evaluate(body, reads, location, there, values, made)
        else:
            given = [x.value if isinstance(x, Constant) else values[x] for x in reads]
            results = equations.evaluate(jaxpr, eqn, given)
            numbers = tuple(range(len(values), len(values) + len(results)))
            values += results
            made.append(Equation(eqn, location, there, tuple(reads), numbers))
            outputs = list(numbers)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

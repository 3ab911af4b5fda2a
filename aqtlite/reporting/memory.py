"""The memory that a compiled program takes, and what a traced one saves."""

import dataclasses
from typing import Any

from jax.extend import core

from aqtlite.jaxpr import equations, scopes
from aqtlite.reporting import sizes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes, as the compiler planned it."""

    arguments: int
    outputs: int
    temporary: int
    """Largest sum of values between arguments and outputs at one time."""

    aliased: int
    """Bytes of arguments that outputs replace (donated ones)."""

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporary values together, aliases once."""
        return self.arguments + self.outputs + self.temporary - self.aliased

    @classmethod
    def of(cls, compiled: Any) -> "Memory | None":
        """Returns the memory of a compiled program; None if the compiler tells none."""
        stats = compiled.memory_analysis()
        if stats is None:
            return None
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.alias_size_in_bytes,
        )


def saved_bytes(closed: core.ClosedJaxpr) -> int:
    """Returns the bytes that forward passes save for the backward passes of a program.

    These are values that the program makes outside of backward passes, and reads in
    them; its arguments, such as weights, do not count. A compiler may save less, and
    compute again.

    >>> import jax, jax.numpy as jnp
    >>> gradient = jax.grad(lambda x: jnp.sum(jnp.sin(x)))
    >>> saved_bytes(jax.make_jaxpr(gradient)(jnp.ones(8)))
    32
    """
    made: dict[Any, int] = {}
    saved: dict[Any, int] = {}
    inside = 0
    for eqn in closed.jaxpr.eqns:
        scope = scopes.parse(scopes.text_of(eqn))
        if "transpose" in scope.transformations:
            read = (x for x in eqn.invars if not isinstance(x, core.Literal))
            saved.update({x: made[x] for x in read if x in made})
            continue
        made.update({x: sizes.of_type(x.aval) for x in eqn.outvars})
        called = equations.called_body(eqn)
        inside += 0 if called is None else saved_bytes(called)
    return inside + sum(saved.values())

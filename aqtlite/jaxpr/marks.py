"""Calls of functions with static values beside them, which a program's reader asks for.

Such a call is an equation, so that its values survive what JAX makes of the program: in
scans, jits and remats it is an equation of their bodies, and `jax.vmap` maps it. Its
derivative is that of the function, and has no mark.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite.lowering import target
from aqtlite.lowering.target import Mapped, Target, TargetDependent
from aqtlite.shapes.sharding import shape_of, shape_of_slice


@dataclasses.dataclass(frozen=True)
class Mark(TargetDependent):
    """A function, and in fields of subclasses what is to be known of its calls."""

    function: Callable[..., jax.Array]
    """Hashable function from arrays to an array."""

    def reference(self, *args: Any) -> jax.Array:
        return self.function(*args)

    def lowered(self, target: Target, *args: Any) -> jax.Array:
        del target
        return self.reference(*args)

    def mapped(self, axes: Sequence[int | None], *args: Any) -> jax.Array:
        leading = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for axis, x in zip(axes, args, strict=True)
        ]
        return Mapped(self, tuple(None if axis is None else 0 for axis in axes))(
            *leading
        )


def mark_of(eqn: Any) -> Mark | None:
    """Returns the mark that an equation calls; None for any other equation."""
    function = target.function_of(eqn)
    return function if isinstance(function, Mark) else None


class MappedCall(NamedTuple):
    """A `jax.vmap` of a call with a mark."""

    body: core.ClosedJaxpr
    is_mapped: tuple[bool, ...]
    """For each input, whether it is mapped, along its leading axis."""

    length: int


def mapped_call(eqn: Any) -> MappedCall | None:
    """Reads a mapped call with a mark; None for any other equation."""
    function = target.function_of(eqn)
    if not isinstance(function, Mapped) or not _is_marked(function):
        return None
    is_mapped = tuple(axis is not None for axis in function.axes)
    avals = [atom.aval for atom in eqn.invars]
    types = tuple(
        shape_of_slice(shape_of(aval)) if one else shape_of(aval)
        for aval, one in zip(avals, is_mapped, strict=True)
    )
    body = _called(function.function, types, jax.sharding.get_abstract_mesh())
    return MappedCall(body, is_mapped, avals[is_mapped.index(True)].shape[0])


def body_of(eqn: Any) -> core.ClosedJaxpr | None:
    """Returns the body of a call with a mark, mapped or not; None for others."""
    if mark_of(eqn) is not None:
        return target.reference_of(eqn)
    mapped = mapped_call(eqn)
    return None if mapped is None else mapped.body


def _is_marked(function: TargetDependent) -> bool:
    while isinstance(function, Mapped):
        function = function.function
    return isinstance(function, Mark)


@functools.lru_cache(maxsize=4096)
def _called(
    function: TargetDependent, types: tuple[Any, ...], mesh: Any
) -> core.ClosedJaxpr:
    del mesh  # A key of the cache: tracing depends on the current mesh.
    return jax.make_jaxpr(function.__call__)(*types)

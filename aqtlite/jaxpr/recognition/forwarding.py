"""Outputs of a jaxpr that are inputs of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from aqtlite.jaxpr.analysis import Analysis, analyze


class _Transposed(NamedTuple):
    """An input with its axes in another order."""

    of: int
    permutation: tuple[int, ...]


class _Slices(NamedTuple):
    """Slices of an array along the leading axis, one for each step of a scan."""

    of: "int | _Transposed | _Slices"


_Source = int | _Transposed | _Slices | None
"""The input that a value is made of; None for a computed value."""


def forwarded_inputs(closed: core.ClosedJaxpr) -> list[int | None]:
    """Returns, for each output, the index of the input that it forwards, or None.

    A scan that slices an array and stacks the slices again forwards the array, also if
    its axes are moved before and moved back behind.
    """
    inputs: list[_Source] = list(range(len(closed.in_avals)))
    found = analyze(closed.jaxpr, inputs, _Forwarding())
    return [source if isinstance(source, int) else None for source in found]


class _Forwarding(Analysis[_Source]):
    def constant(self, atom: Any) -> _Source:
        del atom
        return None

    def equation(self, eqn: Any, inputs: list[_Source]) -> list[_Source]:
        if eqn.primitive.name == "transpose":
            return [_transposed(inputs[0], eqn.params["permutation"])]
        return [None] * len(eqn.outvars)

    def join(self, first: _Source, second: _Source) -> _Source:
        return first if first == second else None

    def unstack(self, fact: _Source) -> _Source:
        return None if fact is None else _Slices(fact)

    def stack(self, fact: _Source, scanned: Sequence[_Source]) -> _Source:
        is_whole = isinstance(fact, _Slices) and fact.of in scanned
        return fact.of if is_whole and isinstance(fact, _Slices) else None


def _transposed(source: _Source, permutation: tuple[int, ...]) -> _Source:
    as_it_is = tuple(range(len(permutation)))
    if isinstance(source, int):
        source = _Transposed(source, as_it_is)
    if not isinstance(source, _Transposed):
        return None
    moved = tuple(source.permutation[axis] for axis in permutation)
    return source.of if moved == as_it_is else _Transposed(source.of, moved)

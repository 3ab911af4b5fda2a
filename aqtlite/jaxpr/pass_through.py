"""Forwarding analysis: the outputs of a jaxpr that are unchanged inputs.

The analysis follows calls and scans: a scan that slices an array and stacks the slices
again forwards the array.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from aqtlite.jaxpr import analysis


class _Slices(NamedTuple):
    """Slices of an input along the leading axis, one for each step of a scan."""

    of: "int | _Slices"


_Source = int | _Slices | None
"""The input that a value is, or slices of one; None for a computed value."""


def forwarded_inputs(closed: core.ClosedJaxpr) -> list[int | None]:
    """Returns, for each output, the index of the input that it forwards, or None."""
    inputs: list[_Source] = list(range(len(closed.in_avals)))
    found = analysis.analyze(closed.jaxpr, inputs, _Forwarding())
    return [source if isinstance(source, int) else None for source in found]


class _Forwarding(analysis.Analysis[_Source]):
    def constant(self, aval: Any) -> _Source:
        del aval
        return None

    def equation(self, eqn: Any, inputs: list[_Source]) -> list[_Source]:
        del inputs
        return [None] * len(eqn.outvars)

    def join(self, first: _Source, second: _Source) -> _Source:
        return first if first == second else None

    def unstack(self, fact: _Source) -> _Source:
        return None if fact is None else _Slices(fact)

    def stack(self, fact: _Source, scanned: Sequence[_Source]) -> _Source:
        is_whole = isinstance(fact, _Slices) and fact.of in scanned
        return fact.of if is_whole and isinstance(fact, _Slices) else None

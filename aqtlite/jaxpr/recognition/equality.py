"""Outputs of a jaxpr that are equal, since the same equations compute them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from aqtlite.jaxpr import equations
from aqtlite.jaxpr.analysis import Analysis, analyze

Number = int
"""Number of a value. Values of one number are equal; others may be, too."""


def numbers_of_outputs(closed: core.ClosedJaxpr) -> list[Number]:
    """Returns a number for each output, the same for outputs that are equal.

    Global value numbering (Alpern, Wegman and Zadeck 1988): the results of a primitive
    are equal if its parameters and its inputs are. Calls and scans are followed into
    their bodies; branches and while loops are primitives.

    >>> import jax
    >>> f = lambda x, y: (x + 1, y + 1, jax.jit(lambda x: x + 1)(x))
    >>> numbers = numbers_of_outputs(jax.make_jaxpr(f)(0.0, 0.0))
    >>> numbers[0] == numbers[2], numbers[0] == numbers[1]
    (True, False)

    Args:
        closed: the jaxpr. Its inputs count as different.
    """
    values = _Values()
    inputs = [values.another() for _ in closed.in_avals]
    return analyze(closed.jaxpr, inputs, values)


class _Values(Analysis[Number]):
    def __init__(self) -> None:
        self._numbers: dict[Any, Number] = {}
        self._unused = itertools.count()
        self._changing: set[Number] = set()
        """Values of a scan that may differ between its steps."""

    def another(self) -> Number:
        """Returns a number that no other value has."""
        return next(self._unused)

    def _number(self, *key: Any) -> Number:
        """Returns the number of values with a key."""
        try:
            found = self._numbers.get(key)
        except TypeError:  # A parameter has no hash.
            return self.another()
        if found is None:
            found = self._numbers[key] = self.another()
        return found

    def constant(self, atom: Any) -> Number:
        if not isinstance(atom, core.Literal):
            return self.another()
        value = np.asarray(equations.literal_value(atom))
        return self._number("literal", atom.aval, value.tobytes())

    def equation(self, eqn: Any, inputs: list[Number]) -> list[Number]:
        if eqn.effects:
            return [self.another() for _ in eqn.outvars]
        params = tuple(sorted(eqn.params.items(), key=lambda one: one[0]))
        return [
            self._number(eqn.primitive, params, tuple(inputs), index, var.aval)
            for index, var in enumerate(eqn.outvars)
        ]

    def join(self, first: Number, second: Number) -> Number:
        if first == second or first in self._changing:
            return first
        changing = self.another()
        self._changing.add(changing)
        return changing

    def unstack(self, fact: Number) -> Number:
        return self._number("slice", fact)

    def stack(self, fact: Number, scanned: Sequence[Number]) -> Number:
        # The arrays that are scanned say how many slices there are.
        return self._number("stack", fact, *scanned) if scanned else self.another()

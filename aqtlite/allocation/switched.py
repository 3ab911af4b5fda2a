"""A traced call whose contractions are switched."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from aqtlite.allocation import gathering
from aqtlite.allocation.gathering import Gathered
from aqtlite.allocation.subject import Call
from aqtlite.allocation.switches import Given, Switch
from aqtlite.jaxpr import tracing
from aqtlite.program.plan import Plan
from aqtlite.program.program import shapes_of


class Pass(NamedTuple):
    """The results of one run of the program."""

    loss: Any
    """The loss; None if there is no function for it."""

    outputs: Any
    """The arrays of floats among the outputs of the model."""

    signals: Any
    """Sum of squares of each contraction's float result, if measured."""

    noises: Any
    """Sum of squares of each contraction's error, if measured."""


@dataclasses.dataclass(frozen=True)
class Switched:
    """A traced call whose contractions are switched."""

    call: Call
    traced: tracing.Traced
    plans: Mapping[str, Plan]
    """Plans of the candidates by name; equal in all but the decisions."""

    switches: tuple[Switch, ...]
    run: Callable[..., Pass]
    """Compiled function of the inputs of the jaxpr, the choices (int32), whether
    contractions are measured (bool), the arrays that alternatives are given, and the
    batch."""

    gather: Callable[[Sequence[Any], Gathered], Gathered]
    """Compiled function of the inputs of the jaxpr and statistics, which returns these
    with those of a float call."""

    def check(self) -> None:
        """Checks that each candidate can quantize each contraction.

        Raises:
            ValueError: if one cannot; the message names it and the contraction.
        """
        gathered = jax.eval_shape(lambda: gathering.first(self.switches))
        for switch in self.switches:
            states = (
                gathering.states_of(switch, candidate, gathered)
                for candidate in range(len(self.plans))
            )
            per_step = switch.forms[0].site.per_step
            switch.check([Given(shapes_of(one, per_step)) for one in states])

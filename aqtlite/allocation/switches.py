"""Contractions with a switch between float and the forms of all candidates.

A loop over rules would compile the model once for each layer and candidate. Here each
contraction has all of its alternatives beside its float form, and the program takes the
index of the one to run as an argument.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import config, errors
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.operations import Side
from aqtlite.program.planned_lookup import Planned
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes import sharding


class Given(NamedTuple):
    """Arrays of an alternative, beside the operands of the contraction."""

    states: States = States()
    """Statistics of its calibrations."""

    frozen: Mapping[Side, QTensor] = {}
    """Weights that a conversion rounds, which a call would round to nearest."""


@dataclasses.dataclass(frozen=True)
class Switch:
    """A contraction, or a lookup, with its alternatives."""

    forms: tuple[Planned, ...]
    """The contraction, or lookup, as each candidate plans it."""

    names: tuple[str, ...]
    """Names of the candidates."""

    @property
    def path(self) -> str:
        """Path of the contraction or lookup."""
        return self.forms[0].path

    @property
    def is_quantized(self) -> tuple[bool, ...]:
        """Whether each candidate quantizes the contraction."""
        return tuple(one.is_quantized for one in self.forms)

    def replacement(
        self, choice: Any, is_measured: Any, given: Sequence[Given]
    ) -> Replacement:
        """Returns the replacement that runs the chosen alternative.

        Args:
            choice: 0 for the float form, and 1 + i for that of candidate i, int32.
            is_measured: whether to return the float result, and add the squares of that
                and of the difference to the alternative's to the auxiliary arrays.
            given: the arrays of each candidate, for each step of the scans around the
                contraction that has parameters of its own.
        """
        site = self.forms[0].site
        per_step = (False,) * len(site.lengths)
        if jax.tree.leaves(given):
            per_step = site.per_step
        steps = tuple(itertools.compress(site.lengths, per_step))
        of_steps = functools.partial(jnp.broadcast_to, shape=steps)
        squares = jnp.zeros((2, *steps), jnp.float32)
        flags = of_steps(choice), of_steps(is_measured)
        return Replacement(
            self._run,
            (*flags, squares[0], squares[1], tuple(given)),
            has_aux=True,
            per_step=per_step,
        )

    def squares(self, aux: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of squares of the float result and of the difference.

        Args:
            aux: the auxiliary arrays that the replacement left.
        """
        _, _, signal, noise, _ = aux
        return jnp.sum(signal), jnp.sum(noise)

    def _run(self, values: Sequence[Any], given: Any) -> tuple[Sequence[Any], Any]:
        choice, is_measured, signal, noise, of_forms = given
        in_float = self.forms[0].in_float
        branches = [lambda values, _: in_float(values), *self._quantized()]
        out = lax.switch(choice, branches, values, of_forms)

        def measured(out: Any) -> Any:
            exact = in_float(values)
            squares = squares_of(exact), squares_of(difference(out, exact))
            return exact, signal + squares[0], noise + squares[1]

        out, signal, noise = lax.cond(
            is_measured, measured, lambda out: (out, signal, noise), out
        )
        return out, (choice, is_measured, signal, noise, of_forms)

    def check(self, given: Sequence[Given]) -> None:
        """Checks that each candidate can quantize the contraction.

        Args:
            given: the arrays of each candidate, or their shapes, without steps.

        Raises:
            ValueError: if one cannot; the message names it.
        """
        avals = [sharding.shape_of(x.aval) for x in self.forms[0].site.eqn.invars]
        for run in self._quantized():
            jax.eval_shape(run, avals, given)

    def _quantized(self) -> list[Callable[[Sequence[Any], Sequence[Given]], Any]]:
        """Returns the alternatives, as they are served.

        Each is a function of the inputs of the equation and the arrays of all of them.
        """
        return [
            functools.partial(_contract, one, name, number)
            for number, (one, name) in enumerate(
                zip(self.forms, self.names, strict=True)
            )
        ]


def _contract(
    one: Planned,
    candidate: str,
    number: int,
    values: Sequence[Any],
    of_forms: Sequence[Given],
) -> list[jax.Array]:
    if not one.is_quantized:
        return one.in_float(values)
    # Results that an injected function quantizes are arrays in the traced program.
    cfg = dataclasses.replace(one.cfg.for_serving(), out=config.Tensor())
    given = of_forms[number]
    lhs, rhs, *others = one.in_order(values)
    operands = [given.frozen.get("lhs", lhs), given.frozen.get("rhs", rhs), *others]
    try:
        return one.contract(cfg, operands, given.states)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the candidate {candidate!r} cannot quantize {errors.quoted(one.path)}: "
            f"{error}. As rules, a candidate can leave it in float: "
            f"{{{candidate!r}: [aqtlite.Rule(path=..., cfg=None), "
            "aqtlite.Rule(cfg=...)]}"
        ) from error


def squares_of(arrays: Any) -> jax.Array:
    """Returns the sum of the squares of all elements, float32."""
    total = jnp.zeros((), jnp.float32)
    for x in jax.tree.leaves(arrays):
        total += jnp.sum(jnp.square(x.astype(jnp.float32)))
    return total


def difference(one: Any, other: Any) -> Any:
    """Returns the difference of two pytrees of floats, float32."""
    return jax.tree.map(
        lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), one, other
    )

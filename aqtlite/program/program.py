"""A traced function with decided rules, as conversion and serving see it."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.contraction import remat
from aqtlite.jaxpr import dependencies, rewriting, sites, tracing
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.jaxpr.sites import Loop
from aqtlite.operations import Side
from aqtlite.program import primitives
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.serving import uses
from aqtlite.program.serving.contraction import (
    CallingModule,
    Contraction,
    Recorder,
)
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.quantization.state_collections import collections_of
from aqtlite.quantization.statistics import States

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, whose contractions are quantized by a plan."""

    traced: tracing.Traced
    plan: Plan
    parameters: Mapping[int, Parameter]
    """The inputs of the jaxpr that are parameters."""

    module_of: Callable[[PlannedContraction], Path]
    """The path under which the frozen weights of a contraction are kept."""

    states_of: Callable[[PlannedContraction], States]
    """The states of its calibrations."""

    place_of: Callable[[PlannedContraction], Path]
    """The path of their statistics in the collection of these."""

    first_position: int = 0
    """The number of the first contraction of a module."""

    def record(self, values: Sequence[Any], recorder: Recorder) -> tuple[Any, Any]:
        """Evaluates the program while a recorder sees every contraction.

        Args:
            values: the inputs of the jaxpr; a `Placeholder` for a parameter that is
                frozen.
            recorder: of `aqtlite.program.serving`.

        Returns:
            The outputs of the jaxpr, and the nodes that were stored.
        """
        replacements = {}
        for one, module, position in self.numbered():
            obstacle, states = _obstacle(one), self.states_of(one)
            given: States | None = states
            record = functools.partial(
                self._recorded, one, module, position, obstacle, recorder
            )
            has_states = bool(collections_of(one.cfg)) and any(per_step(one))
            if obstacle is None and not has_states:
                # What a loop carries is the weight that the last step leaves.
                record = functools.partial(_with_states, record, states)
                given = None
            replacements[one.site.location] = Replacement(
                record,
                given,
                leaves=obstacle is None,
                per_step=per_step(one),
            )
        outputs, left = rewriting.evaluate(
            self.traced.jaxpr, arrays(values), replacements
        )
        return outputs, [node for nodes in left.values() for node in nodes]

    def parameters_of_weights(self) -> set[Parameter]:
        """The parameters of which weights of quantized contractions are made."""
        return {
            self.parameters[i]
            for one in self.plan.quantized()
            for origin in one.site.operands
            if origin.identity is not None
            for i in self.parameters.keys() & origin.needed
        }

    def quantized_elsewhere(self) -> set[Parameter]:
        """The parameters of weights that functions inside quantize on their own.

        They contract by the library's functions, which rules leave as they are: what
        these quantize has a name in the trace.
        """
        return {
            self.parameters[i]
            for name in (remat.LHS, remat.RHS)
            for value in dependencies.occurrences(self.traced.jaxpr, name)
            if value.dependencies <= self.parameters.keys()
            for i in value.dependencies
        }

    def numbered(self) -> list[tuple[PlannedContraction, Path, int]]:
        """The quantized contractions, with the numbers that they have in a module."""
        counts: collections.Counter[Path] = collections.Counter()
        numbered = []
        for one in self.plan.quantized():
            module = self.module_of(one)
            numbered.append((one, module, self.first_position + counts[module]))
            counts[module] += 1
        return numbered

    def contraction(
        self, one: PlannedContraction, values: Sequence[Any], states: States
    ) -> Contraction:
        """A contraction as it is in serving.

        Args:
            one: the contraction.
            values: the inputs of its equation, or their types.
            states: states of the calibrations.
        """
        eqn = one.site.eqn
        lhs, rhs = one.in_order(values)[:2]
        return Contraction(
            cfg=one.cfg.for_serving(),
            frozen_operands="auto",
            name=None,
            operation=primitives.operation_of(eqn, values, exchanged=one.is_exchanged),
            lhs=lhs,
            rhs=rhs,
            states=states,
            digests={side: origin.identity for side, origin in origins(one).items()},
        )

    def _recorded(
        self,
        one: PlannedContraction,
        module: Path,
        position: int,
        obstacle: str | None,
        recorder: Recorder,
        values: Sequence[Any],
        states: States,
    ) -> tuple[Sequence[Any], list[Any]]:
        nodes: list[Any] = []
        call = self.contraction(one, values, states)
        uses.note_operands(call, self.place_of(one), needs_frozen=True)
        call = recorder(call, CallingModule(module, obstacle, nodes.append), position)
        states = call.states if call.cfg.is_quantized else States()
        return [contract(one, call, call.lhs, call.rhs, values, states)], nodes


def contract(
    one: PlannedContraction,
    call: Contraction,
    lhs: Any,
    rhs: Any,
    values: Sequence[Any],
    states: States,
) -> jax.Array:
    """Evaluates a contraction, quantized.

    Args:
        one: the contraction.
        call: the same, as it is in serving.
        lhs: the operand that is first in the config; may be a `QTensor`.
        rhs: the other one.
        values: the inputs of its equation.
        states: states of the calibrations.
    """
    operands = [lhs, rhs, *values[2:]]
    return primitives.contract(
        one.site.eqn, call.cfg, operands, states, exchanged=one.is_exchanged
    )


def arrays(values: Sequence[Any]) -> list[Any]:
    """NaN in place of what is frozen, which no contraction of frozen weights reads."""
    return [_unknown(x) if isinstance(x, Placeholder) else x for x in values]


def _unknown(x: Placeholder) -> jax.Array:
    value = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jnp.full(x.shape, value, x.dtype, device=x.struct.sharding)


def _with_states(
    record: Callable[[Sequence[Any], States], Any],
    states: States,
    values: Sequence[Any],
    given: None,
) -> Any:
    del given
    return record(values, states)


def per_step(one: PlannedContraction) -> tuple[bool, ...]:
    """For each scan around a contraction, whether every step has arrays of its own."""
    if collections_of(one.cfg):
        return one.site.per_step
    return weights_per_step(one)


def weights_per_step(one: PlannedContraction) -> tuple[bool, ...]:
    """The same of its frozen weights."""
    weights = [x for x in one.site.operands if x.identity is not None]
    return tuple(
        any(Loop(depth, False) in weight.needed for weight in weights)
        for depth in range(len(one.site.per_step))
    )


def _obstacle(one: PlannedContraction) -> str | None:
    """Why no weight of a contraction can be frozen, if so."""
    for name, text in (
        ("cond", "a branch of lax.cond or lax.switch"),
        ("while", "a lax.while_loop"),
        ("shard_map", "a jax.shard_map"),
    ):
        if name in one.site.around:
            return f"contracted inside {text}, which weights cannot leave"
    if per_step(one) != weights_per_step(one):
        return "in a scan, its calibration has a state for each step, and it has none"
    has_both = any(per_step(one)) and not all(per_step(one))
    if has_both and collections_of(one.cfg):
        return "only some of the scans around it have a state for each step"
    return None


def origins(one: PlannedContraction) -> dict[Side, sites.Origin]:
    """What the operands come from, in the order of the config."""
    lhs, rhs = one.in_order(one.site.operands)
    return {"lhs": lhs, "rhs": rhs}

"""Weight discovery: the operands of a model's contractions that are weights.

A weight is an operand whose value depends on nothing but parameters and constants.
The trace stores nothing: it names the operands, wherever they are, so that those that
cannot be frozen are found, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from aqtlite import config
from aqtlite.jaxpr import dependencies
from aqtlite.operations import Side
from aqtlite.program.serving.call_site import Operand
from aqtlite.program.serving.contraction import CallingModule, Contraction, OperandKey
from aqtlite.program.serving.model import CallTrace, Model, Parameter

_names = itertools.count()


@dataclasses.dataclass(frozen=True)
class FoundOperand:
    """An operand of a contraction, in the trace of one call."""

    key: OperandKey
    operand: Operand
    cfg: config.DotGeneral
    batch_axes: tuple[int, ...]
    is_required: bool
    """`frozen_operands` names it."""

    is_allowed: bool
    """`frozen_operands` lets it be frozen."""

    obstacle: str | None
    """The reason why no weight can be frozen here, if there is one."""

    parameters: frozenset[Parameter] = frozenset()
    """The parameters that it depends on."""

    depends_on_buffers: bool = False
    """It depends on variables that are no parameters."""

    depends_on_inputs: bool = False

    def __str__(self) -> str:
        return f"{self.operand} of {'/'.join(self.key.path) or '/'}"


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The operands in the trace of one call."""

    trace: CallTrace
    operands: Mapping[str, FoundOperand]
    """By the name of the value in the jaxpr."""

    num_contractions: int
    """Those in float included."""

    learned: frozenset[Parameter]
    """The parameters of learned calibrations."""

    def read_parameters(self, frozen: frozenset[OperandKey]) -> frozenset[Parameter]:
        """Returns the parameters that the call reads if some operands are frozen."""
        without = {name for name, one in self.operands.items() if one.key in frozen}
        found = dependencies.output_dependencies(self.trace.jaxpr, without)
        read = frozenset().union(*found)
        return frozenset(p for i, p in self.trace.parameters.items() if i in read)


def discover(model: Model, call: int) -> Discovery:
    """Traces a call of a model, and analyzes what its contractions' operands are."""
    found: dict[str, FoundOperand] = {}
    num_contractions = 0
    states = f"aqtlite states {next(_names)}"

    def name_operands(
        contraction: Contraction, caller: CallingModule, position: int
    ) -> Contraction:
        nonlocal num_contractions
        num_contractions += 1
        named = {"lhs": contraction.lhs, "rhs": contraction.rhs}
        for side in contraction.quantized_sides():
            name = f"aqtlite operand {next(_names)}"
            found[name] = _found(contraction, caller, position, side)
            named[side] = checkpoint_name(named[side], name)
        for state in jax.tree.leaves(contraction.states):
            checkpoint_name(state, states)
        return dataclasses.replace(contraction, **named).in_float()

    trace = model.trace(call, name_operands, {})
    values = dependencies.named_values(trace.jaxpr)
    operands = {
        name: _with_dependencies(one, values[name], trace)
        for name, one in found.items()
        if name in values
    }
    reads = values[states].dependencies if states in values else frozenset()
    learned = frozenset(p for i, p in trace.parameters.items() if i in reads)
    return Discovery(trace, operands, num_contractions, learned)


def _found(
    contraction: Contraction, caller: CallingModule, position: int, side: Side
) -> FoundOperand:
    return FoundOperand(
        key=OperandKey(caller.path, position, side),
        operand=contraction.operand(side),
        cfg=contraction.cfg,
        batch_axes=contraction.operation.axes(side).batch,
        is_required=contraction.frozen_operands in (side, "both"),
        is_allowed=contraction.frozen_operands in ("auto", "both", side),
        obstacle=caller.obstacle,
    )


def _with_dependencies(
    found: FoundOperand, value: dependencies.NamedValue, trace: CallTrace
) -> FoundOperand:
    depends = value.dependencies
    in_branch = "contracted inside nn.cond, nn.switch, nn.while_loop or the like"
    return dataclasses.replace(
        found,
        parameters=frozenset(p for i, p in trace.parameters.items() if i in depends),
        depends_on_buffers=bool(depends & trace.buffers.keys()),
        depends_on_inputs=bool(
            depends - trace.buffers.keys() - trace.parameters.keys()
        ),
        obstacle=found.obstacle or (in_branch if value.is_in_branch else None),
    )


class Refusal(NamedTuple):
    """The reason why an operand is not frozen."""

    why: str
    is_expected: bool = False
    """Nobody would want it frozen, or somebody asked for it to stay in float."""


def weights(
    operands: Iterable[FoundOperand],
) -> tuple[frozenset[OperandKey], dict[OperandKey, Refusal]]:
    """Returns the operands to freeze, and why others are not.

    Args:
        operands: operands of one call of the model.

    Raises:
        ValueError: if `frozen_operands` names one that depends on the inputs.
    """
    by_key: dict[OperandKey, list[FoundOperand]] = {}
    for one in operands:
        by_key.setdefault(one.key, []).append(one)
    refusals = {key: _refusal(found) for key, found in by_key.items()}
    chosen = {key for key, refusal in refusals.items() if refusal is None}
    for key in sorted(chosen):
        is_required = all(one.is_required for one in by_key[key])
        if key.side == "lhs" and key._replace(side="rhs") in chosen and not is_required:
            # The lhs may be one that was broadcast to the inputs' batch.
            chosen.discard(key)
            refusals[key] = Refusal("the rhs is a weight, too", is_expected=True)
    return frozenset(chosen), {k: r for k, r in refusals.items() if r is not None}


def _refusal(found: list[FoundOperand]) -> Refusal | None:
    refusals = [refusal for one in found if (refusal := _refusal_of(one)) is not None]
    unexpected = [refusal for refusal in refusals if not refusal.is_expected]
    return next(iter(unexpected + refusals), None)


def _refusal_of(one: FoundOperand) -> Refusal | None:
    shape = one.operand.shape
    raw = one.cfg.fwd
    if one.depends_on_inputs or one.depends_on_buffers:
        if one.is_required and one.obstacle is None:
            raise ValueError(
                f"frozen_operands asks to freeze the {one}, but its value depends on "
                "the model's inputs, on rngs, or on a collection other than 'params'; "
                "use frozen_operands='auto'"
            )
        if one.depends_on_inputs:
            return Refusal("its value depends on the inputs", is_expected=True)
        return Refusal("its value depends on a collection other than 'params'")
    if not one.is_allowed:
        return Refusal("frozen_operands says so", is_expected=True)
    if not one.parameters:
        return Refusal("it is a constant", is_expected=True)
    if one.obstacle is not None:
        return Refusal(one.obstacle)
    if raw.smoothing is not None and not raw.smoothing.has_state:
        return Refusal(
            "fwd.smoothing computes its scales from the activations of every call; "
            "take them from statistics: "
            "fwd.smoothing.lhs_calibration=calibration.MaxOverBatches()"
        )
    if math.prod(shape) == 1:
        return Refusal("it is a single number", is_expected=True)
    may_be_batch = set(one.batch_axes)
    if one.operand.side == "lhs":
        may_be_batch = set(range(len(shape))) - set(one.operand.contracting)
    if not one.is_required and any(shape[axis] == 1 for axis in may_be_batch):
        return Refusal("it has an axis of size one, which may be a batch")
    return None

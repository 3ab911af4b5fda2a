"""Which operands of a model's contractions are weights, found by tracing it once.

A weight is an operand whose value depends on nothing but parameters and constants.
The trace changes nothing and records nothing: it marks the operands, wherever they
are, so that what cannot be frozen is found, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from aqtlite import config
from aqtlite.flax import observing, program, tracing
from aqtlite.flax.observing import Contraction, Key
from aqtlite.flax.site import COLLECTION, Operand

_marks = itertools.count()


@dataclasses.dataclass(frozen=True)
class Found:
    """An operand of a contraction, in the trace of one call."""

    key: Key
    operand: Operand
    cfg: config.DotGeneral
    batch_axes: tuple[int, ...]
    is_required: bool
    """Whether `frozen_operands` names it."""

    is_allowed: bool
    """Whether `frozen_operands` lets it be frozen."""

    obstacle: str | None
    """Why a weight could not be frozen here."""

    params: frozenset[int] = frozenset()
    """The leaves of "params" that it depends on."""

    collections: frozenset[int] = frozenset()
    """The leaves of other collections that it depends on."""

    depends_on_inputs: bool = False

    def __str__(self) -> str:
        return f"{self.operand} of {'/'.join(self.key.path) or '/'}"


@dataclasses.dataclass(frozen=True)
class Discovery:
    """A trace of one call of the model, and the operands in it."""

    trace: tracing.Trace
    operands: Mapping[str, Found]
    """By mark."""

    def read_params(self, frozen: frozenset[Key]) -> frozenset[int]:
        """The leaves of "params" that the call reads, if some operands are frozen."""
        without = {mark for mark, one in self.operands.items() if one.key in frozen}
        found = program.output_dependencies(self.trace.program, without)
        read = frozenset().union(*found)
        return frozenset(i for i in read if i < self.trace.num_params)


def discover(
    model: nn.Module, variables: Mapping[str, Any], call: tracing.Call
) -> Discovery:
    """Traces a call of a model and says what its contractions' operands depend on."""
    operands: dict[str, Found] = {}

    def mark(contraction: Contraction, position: int) -> tuple[Any, Any]:
        marked = {"lhs": contraction.lhs, "rhs": contraction.rhs}
        for side in contraction.quantized_sides():
            name = f"aqtlite operand {next(_marks)}"
            operands[name] = _found(contraction, position, side)
            marked[side] = checkpoint_name(marked[side], name)
        return marked["lhs"], marked["rhs"]

    with observing.observed_by(mark):
        trace = tracing.trace_call(model, variables, call)
    marked = program.marked_values(trace.program)
    return Discovery(
        trace,
        {
            name: _with_dependencies(one, marked[name], trace)
            for name, one in operands.items()
            if name in marked
        },
    )


def _found(contraction: Contraction, position: int, side: str) -> Found:
    caller = contraction.caller
    return Found(
        key=Key(() if caller is None else caller.scope.path, position, side),
        operand=contraction.operand(side),
        cfg=contraction.cfg,
        batch_axes=contraction.batch_axes(side),
        is_required=contraction.frozen_operands in (side, "both"),
        is_allowed=contraction.frozen_operands in ("auto", "both", side),
        obstacle=_obstacle(contraction),
    )


def _obstacle(contraction: Contraction) -> str | None:
    caller = contraction.caller
    if caller is None:
        return "contracted outside of a Flax module"
    if not caller.is_inside:
        return (
            "contracted inside a jax.jit, jax.vmap or another transformation of the "
            "module's own (jnp.einsum is one), which no variables can leave"
        )
    if any(cls.__module__.startswith("flax.nnx") for cls in type(caller.module).mro()):
        return "contracted inside an NNX module (nnx.bridge.to_linen)"
    if not caller.scope.is_mutable_collection(COLLECTION):
        return (
            f"the collection '{COLLECTION}' is not lifted here. In nn.scan or nn.vmap "
            "lift it like 'params': variable_axes={'params': 0, "
            f"'{COLLECTION}': 0}}, or variable_broadcast=['params', '{COLLECTION}']; "
            "in a nested Module.apply, nn.map_variables or nn.WeightNorm it cannot be"
        )
    return None


def _with_dependencies(
    found: Found, marked: program.Marked, trace: tracing.Trace
) -> Found:
    first, last = trace.num_params, trace.num_variables
    depends = marked.dependencies
    opaque = "contracted inside nn.cond, nn.switch, nn.while_loop or the like"
    return dataclasses.replace(
        found,
        params=frozenset(i for i in depends if i < first),
        collections=frozenset(i for i in depends if first <= i < last),
        depends_on_inputs=any(i >= last for i in depends),
        obstacle=found.obstacle or (opaque if marked.is_opaque else None),
    )


class Refusal(NamedTuple):
    """Why an operand is not frozen."""

    why: str
    is_expected: bool = False
    """Whether nobody would want it frozen, or somebody asked for it."""


def weights(
    operands: Iterable[Found],
) -> tuple[frozenset[Key], dict[Key, Refusal]]:
    """The operands to freeze, and why others are not.

    Args:
        operands: of one call of the model.

    Raises:
        ValueError: if `frozen_operands` names one that depends on the inputs.
    """
    by_key: dict[Key, list[Found]] = {}
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


def _refusal(found: list[Found]) -> Refusal | None:
    refusals = [refusal for one in found if (refusal := _refusal_of(one)) is not None]
    unexpected = [refusal for refusal in refusals if not refusal.is_expected]
    return next(iter(unexpected + refusals), None)


def _refusal_of(one: Found) -> Refusal | None:
    shape = one.operand.shape
    if one.depends_on_inputs or one.collections:
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
    if not one.params:
        return Refusal("it is a constant", is_expected=True)
    if one.obstacle is not None:
        return Refusal(one.obstacle)
    if math.prod(shape) == 1:
        return Refusal("it is a single number", is_expected=True)
    may_be_batch = set(one.batch_axes)
    if one.operand.side == "lhs":
        may_be_batch = set(range(len(shape))) - set(one.operand.contracting)
    if not one.is_required and any(shape[axis] == 1 for axis in may_be_batch):
        return Refusal("it has an axis of size one, which may be a batch")
    return None

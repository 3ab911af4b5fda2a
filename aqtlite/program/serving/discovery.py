"""Weights among the operands of a model's contractions.

A weight is an operand that depends only on parameters and constants. Operands that
cannot be frozen are returned with the reason.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aqtlite.program.serving.contraction import OperandKey
from aqtlite.program.serving.model import Discovery, FoundOperand


class Refusal(NamedTuple):
    """The reason why an operand is not frozen."""

    why: str
    is_expected: bool = False
    """Whether it is no candidate, such as an activation, or stays float on request."""


def check_some(discoveries: Sequence[Discovery]) -> None:
    """Raises ValueError if no contraction of any call is quantized."""
    if any(one.operands for one in discoveries):
        return
    count = sum(one.num_contractions for one in discoveries)
    if count:
        raise ValueError(
            f"nothing to freeze: the configs of all {count} contractions that were "
            "traced quantize nothing (cfg=None or config.unquantized()). The model is "
            "a float model, whose trained variables serve as they are"
        )
    raise ValueError(
        "nothing to freeze: the method that was called has no AqtDotGeneral or "
        "AqtEinsum with a config that quantizes, and no contraction that a rule "
        "quantizes (plan says why)"
    )


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
            # The lhs may have been broadcast to the batch of the inputs.
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
    if one.frozen_operands != "auto" and not one.is_required:
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

"""Warnings of calibrations that cost too much for every training step."""

import warnings

from aqtlite import errors
from aqtlite.contraction.execution import Execution, OperandExecution
from aqtlite.operations import Side
from aqtlite.qtensor.qtensor import Operand, QTensor

_WITH_STATISTICS = ("fwd.lhs", "fwd.rhs", "dlhs.lhs", "drhs.lhs")
"""The operands whose calibration may keep a range."""


def warn(
    how: Execution, lhs: Operand, rhs: Operand, differentiated: tuple[Side, ...]
) -> None:
    """Warns of costly calibrations in a contraction that is differentiated.

    Python shows a warning of the same text once, however often a step is traced.

    Args:
        how: what runs in what.
        lhs: an operand; a `QTensor` is not calibrated here.
        rhs: the other one.
        differentiated: those whose gradient is asked for.
    """
    forward = (how.fwd.lhs, lhs), (how.fwd.rhs, rhs)
    calibrated = [one for one, x in forward if not isinstance(x, QTensor)]
    for side in differentiated:
        gradient = how.gradient(side)
        calibrated.append(gradient.lhs)
        if gradient.rhs.reuse is None:
            calibrated.append(gradient.rhs)
    for one in calibrated:
        _warn_of(one)


def _warn_of(one: OperandExecution) -> None:
    calibration = one.tensor.calibration
    cost = calibration.cost_in_training
    if not one.tensor.is_quantized or cost is None:
        return
    advice = "train with calibration.AbsMax()"
    if one.path.startswith("fwd."):
        advice += " and convert with this one"
    if one.path in _WITH_STATISTICS:
        advice += (
            ", or keep its range for several batches with "
            "calibration.Periodic(of=..., period=100)"
        )
    warnings.warn(
        f"{one.path}.calibration={calibration!r} takes {cost}, at every training step: "
        f"{advice}",
        errors.CostWarning,
        stacklevel=1,
    )

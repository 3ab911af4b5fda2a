"""Warnings about calibrations that cost too much at every training step."""

import warnings

from aqtlite import errors
from aqtlite.contraction.execution import OperandExecution

_WITH_STATISTICS = ("fwd.lhs", "fwd.rhs", "dlhs.lhs", "drhs.lhs")
"""The operands that may have a calibration with statistics."""


def warn(one: OperandExecution, cost: str) -> None:
    """Warns about an operand's costly calibration in a differentiated contraction.

    Python shows a warning of equal text once, however often a step is traced.

    Args:
        one: Operand that is calibrated at every step.
        cost: Cost of the calibration (its `cost_in_training`).
    """
    advice = "train with calibration.AbsMax()"
    if one.path.startswith("fwd."):
        advice += " and convert with this one"
    if one.path in _WITH_STATISTICS:
        advice += (
            ", or keep its range for several batches with "
            "calibration.Periodic(of=..., period=100)"
        )
    warnings.warn(
        f"{one.path}.calibration={one.tensor.calibration!r} takes {cost}, at every "
        f"training step: {advice}",
        errors.CostWarning,
        stacklevel=1,
    )

"""Warnings of calibrations that cost too much for every training step."""

import warnings

from aqtlite import errors
from aqtlite.contraction.execution import OperandExecution

_WITH_STATISTICS = ("fwd.lhs", "fwd.rhs", "dlhs.lhs", "drhs.lhs")
"""The operands whose calibration may keep a range."""


def warn(one: OperandExecution, cost: str) -> None:
    """Warns of the calibration of an operand in a contraction that is differentiated.

    Python shows a warning of the same text once, however often a step is traced.

    Args:
        one: Operand that is calibrated at every step.
        cost: Cost of the calibration, as it says itself.
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

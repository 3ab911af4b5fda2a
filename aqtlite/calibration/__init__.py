"""Calibrations: the choice of the range that a grid has to reach."""

from aqtlite.calibration.abs_max import AbsMax
from aqtlite.calibration.base import (
    Calibration,
    Range,
    ceil_to_power_of_two,
    scale_and_zero_point,
    scale_from_bound,
)
from aqtlite.calibration.delayed_scaling import DelayedScaling
from aqtlite.calibration.over_batches import (
    MaxOverBatches,
    MeanOverBatches,
    MovingAverage,
)

__all__ = [
    "AbsMax",
    "Calibration",
    "DelayedScaling",
    "MaxOverBatches",
    "MeanOverBatches",
    "MovingAverage",
    "Range",
    "ceil_to_power_of_two",
    "scale_and_zero_point",
    "scale_from_bound",
]

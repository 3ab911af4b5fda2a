"""Calibration: from an array and the axes that share a scale to that scale."""

from aqtlite.calibration.abs_max import AbsMax
from aqtlite.calibration.base import (
    Calibration,
    ceil_to_power_of_two,
    scale_from_bound,
)

__all__ = ["AbsMax", "Calibration", "ceil_to_power_of_two", "scale_from_bound"]

"""Calibrations, which choose the range of values that a grid covers.

A calibration is a frozen dataclass, one file each; custom ones derive from
`Calibration`. Some look at the array, some keep statistics over batches, and some have
parameters learned in training. Read `base` first.
"""

from aqtlite.calibration.abs_max import AbsMax
from aqtlite.calibration.abs_mean import AbsMean
from aqtlite.calibration.base import (
    Calibration,
    Parameters,
    Quantized,
    Range,
    Statistics,
)
from aqtlite.calibration.constant import Constant, ConstantRange
from aqtlite.calibration.delayed_scaling import DelayedScaling
from aqtlite.calibration.learned_clipping import LearnedClipping
from aqtlite.calibration.lsq import LSQ
from aqtlite.calibration.lsq_plus import LSQPlus
from aqtlite.calibration.min_max import MinMax
from aqtlite.calibration.mse_over_batches import MseOverBatches
from aqtlite.calibration.mse_search import MseSearch
from aqtlite.calibration.over_batches import (
    MaxOverBatches,
    MeanOverBatches,
    MovingAverage,
)
from aqtlite.calibration.overflow_aware import OverflowAware
from aqtlite.calibration.pact import PACT
from aqtlite.calibration.percentile import Percentile
from aqtlite.calibration.percentile_over_batches import PercentileOverBatches
from aqtlite.calibration.periodic import Periodic
from aqtlite.calibration.rms import RMS
from aqtlite.calibration.rounded_scale import RoundedScale
from aqtlite.calibration.scale_grids import ceil_to_power_of_two
from aqtlite.calibration.scales import (
    scale_and_zero_point,
    scale_factor,
    scale_from_bound,
)
from aqtlite.calibration.snr_search import SnrSearch
from aqtlite.calibration.weighted_deviations import WeightedDeviations

__all__ = [
    "LSQ",
    "PACT",
    "RMS",
    "AbsMax",
    "AbsMean",
    "Calibration",
    "Constant",
    "ConstantRange",
    "DelayedScaling",
    "LSQPlus",
    "LearnedClipping",
    "MaxOverBatches",
    "MeanOverBatches",
    "MinMax",
    "MovingAverage",
    "MseOverBatches",
    "MseSearch",
    "OverflowAware",
    "Parameters",
    "Percentile",
    "PercentileOverBatches",
    "Periodic",
    "Quantized",
    "Range",
    "RoundedScale",
    "SnrSearch",
    "Statistics",
    "WeightedDeviations",
    "ceil_to_power_of_two",
    "scale_and_zero_point",
    "scale_factor",
    "scale_from_bound",
]

"""Config of smoothing: scales moved between the operands of a contraction."""

import dataclasses

from aqtlite import calibration as calibrations
from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Smoothing(representation.CompactRepr):
    """Moves the spread of channels from one operand of a contraction to the other.

    Before quantization, lhs is divided by, and rhs multiplied with, one scale per
    channel of the contracting (and batch) axes, which leaves the products unchanged::

        s_j = max|lhs_j| ** lhs_exponent / max|rhs_j| ** rhs_exponent

    SmoothQuant with migration strength alpha (Xiao et al. 2023, arXiv:2211.10438) is
    ``Smoothing(lhs_exponent=alpha, rhs_exponent=1 - alpha)``; AQT calls it mid
    quantization. With ``lhs_exponent=alpha, rhs_exponent=0`` and `AbsMean` it is the
    scaling of AWQ (Lin et al. 2024, arXiv:2306.00978).

    By default the scales are computed from the current operands. If a calibration
    gathers statistics, these fix the scales, and conversion folds the scales into
    frozen weights. Gradients treat the scales as constants.

    >>> from aqtlite import calibration
    >>> Smoothing(lhs_calibration=calibration.MaxOverBatches())
    Smoothing(lhs_calibration=MaxOverBatches())

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if an exponent is not from 0 to 1, if both are 0, or if a
            calibration is given that has no effect because the exponent is 0.
    """

    lhs_exponent: float = 0.5
    """Share of the spread of lhs that moves to rhs, from 0 to 1."""

    rhs_exponent: float = 0.5
    """Share of the spread of rhs that moves to lhs, from 0 to 1."""

    lhs_calibration: calibrations.Calibration = calibrations.AbsMax()
    """Calibration that finds the magnitude of each lhs channel."""

    rhs_calibration: calibrations.Calibration = calibrations.AbsMax()
    """Calibration that finds the magnitude of each rhs channel."""

    po2_scale: bool = True
    """Round scales to the nearest power of two, in the logarithm. Division and
    multiplication by such a scale are exact and cancel bit for bit."""

    @property
    def sees_rows(self) -> bool:
        """True if scales are found from all rows of the current lhs."""
        how = self.lhs_calibration
        is_known = how.needs_state or how.is_blind
        return self.lhs_exponent > 0 and not is_known

    def __post_init__(self) -> None:
        for side in ("lhs", "rhs"):
            self._check_exponent(f"{side}_exponent")
            self._check_calibration(f"{side}_calibration", f"{side}_exponent")
        fields.check(self, po2_scale=fields.flag)
        if self.lhs_exponent == self.rhs_exponent == 0:
            raise ValueError(
                "Smoothing would have no effect, because both exponents are 0; set "
                "lhs_exponent or rhs_exponent, or leave smoothing None"
            )

    def _check_exponent(self, name: str) -> None:
        value = fields.number(getattr(self, name), f"Smoothing.{name}")
        if not 0 <= value <= 1:
            raise ValueError(f"Smoothing.{name} must be from 0 to 1, got {value}")
        object.__setattr__(self, name, value)

    def _check_calibration(self, name: str, exponent: str) -> None:
        value, cls = getattr(self, name), calibrations.Calibration
        what = "a calibration such as AbsMax()"
        fields.instance(cls, what)(value, f"Smoothing.{name}")
        if getattr(self, exponent) == 0 and value != calibrations.AbsMax():
            raise ValueError(
                f"Smoothing.{name}={value!r} would have no effect, because {exponent} "
                f"is 0; set {exponent}, or leave {name} at its default"
            )

    @property
    def has_state(self) -> bool:
        """True if the scales come from statistics rather than the current operands."""
        return self.lhs_calibration.has_state or self.rhs_calibration.has_state

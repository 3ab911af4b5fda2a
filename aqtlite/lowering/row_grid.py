"""Grids to which kernels round rows of floats that they multiply."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class OwnScales:
    """How each row has a scale of its own, as `calibration.scale_from_bound` finds it.

    It is the largest magnitude of the row times `factor`, `of_zeros` where that is zero
    or subnormal, and NaN where an element is not finite.
    """

    factor: np.float32

    of_zeros: float
    """Scale of a row of zeros."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A symmetric grid of integers up to 127, zero among them, with a bound of 4 or
    more: scales have normal reciprocals."""

    largest: int
    """Magnitude at which integers are clipped."""

    own_scales: OwnScales | None
    """None for one scale of all rows, which is given."""

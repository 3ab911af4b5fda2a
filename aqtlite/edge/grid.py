"""The integers of a value of a full-integer program, and what they stand for."""

import dataclasses
from typing import Any

LIMITS = {
    "int2": (-2, 1),
    "int4": (-8, 7),
    "int8": (-128, 127),
    "int16": (-32768, 32767),
    "int32": (-(2**31), 2**31 - 1),
}
"""The smallest and the largest integer of each dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Integers ``q`` that stand for ``scale * (q - zero_point)``."""

    scale: Any
    """float32, of shape () or, along `axis`, one for each channel."""

    zero_point: int = 0
    dtype: str = "int8"
    """"int8", "int16", "int4", "int2", or "int32" for a bias."""

    axis: int | None = None
    """The axis of the channels, not negative; None for one scale."""

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest integer."""
        return LIMITS[self.dtype]

    @property
    def ends(self) -> tuple[Any, Any]:
        """The smallest and the largest value."""
        low, high = self.limits
        return (
            self.scale * (low - self.zero_point),
            self.scale * (high - self.zero_point),
        )

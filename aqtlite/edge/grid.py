"""Grids of a full-integer program: integers with a scale and a zero point."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

LIMITS = {
    "int2": (-2, 1),
    "int4": (-8, 7),
    "int8": (-128, 127),
    "int16": (-32768, 32767),
    "int32": (-(2**31), 2**31 - 1),
}
"""Smallest and largest integer of each dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Integers ``q`` that represent ``scale * (q - zero_point)``."""

    scale: Any
    """Scale, float32, of shape () or one for each channel along `axis`."""

    zero_point: int = 0
    dtype: str = "int8"
    """Dtype of the integers: "int8", "int16", "int4", "int2", or "int32" for a bias."""

    axis: int | None = None
    """Channel axis, not negative; None for a per-tensor scale."""

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest integer."""
        return LIMITS[self.dtype]

    @property
    def ends(self) -> tuple[Any, Any]:
        """Smallest and largest float that the grid represents."""
        low, high = self.limits
        return (
            self.scale * (low - self.zero_point),
            self.scale * (high - self.zero_point),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """An array of integers, and their grid."""

    qvalue: Any
    """Integers, in any dtype wide enough."""

    grid: Grid

    @property
    def centered(self) -> jax.Array:
        """Integers minus the zero point, int32."""
        return jnp.asarray(self.qvalue).astype(jnp.int32) - self.grid.zero_point

    def dequant(self) -> jax.Array:
        """Dequantizes: ``float32(q - zero_point) * scale``.

        Source: XNNPACK, ``qs8-f32-vcvt``; TFLite computes the same.
        """
        scale = jnp.asarray(self.grid.scale, jnp.float32)
        if self.grid.axis is not None:
            shape = [1] * jnp.ndim(self.qvalue)
            shape[self.grid.axis] = -1
            scale = scale.reshape(shape)
        return self.centered.astype(jnp.float32) * scale

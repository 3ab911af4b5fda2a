"""The integers of a value of a full-integer program, and what they stand for."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """An array of integers, and their grid."""

    qvalue: Any
    """Integers, in any dtype that holds them."""

    grid: Grid

    @property
    def centered(self) -> jax.Array:
        """The integers less the zero point, int32."""
        return jnp.asarray(self.qvalue).astype(jnp.int32) - self.grid.zero_point

    def dequant(self) -> jax.Array:
        """The floats that the integers stand for: ``float32(q - zero_point) * scale``.

        Source: XNNPACK, ``qs8-f32-vcvt``, and TFLite alike.
        """
        scale = jnp.asarray(self.grid.scale, jnp.float32)
        if self.grid.axis is not None:
            shape = [1] * jnp.ndim(self.qvalue)
            shape[self.grid.axis] = -1
            scale = scale.reshape(shape)
        return self.centered.astype(jnp.float32) * scale

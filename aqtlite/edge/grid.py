"""Grids of a full-integer program: integers with a scale and a zero point."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LIMITS = {
    "uint4": (0, 15),
    "int2": (-2, 1),
    "int4": (-8, 7),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "int32": (-(2**31), 2**31 - 1),
}
"""Smallest and largest integer of each dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Integers ``q`` that represent ``scale * (q - zero_point)``."""

    scale: Any
    """Scale, float32, of shape () or one for each channel along `axis`; with `block`,
    of the rank of the integers."""

    zero_point: Any = 0
    """An int; for weights also an array like `scale`."""

    dtype: str = "int8"
    """Dtype of the integers: "int8", "int16", "int4", "int2", or "int32" for a bias;
    for weights also "uint4", and "uint8" for inputs and outputs of a file."""

    axis: int | None = None
    """Channel axis, not negative; None for a per-tensor scale."""

    block: int | None = None
    """Number of elements along `axis` that share a scale, and each element along all
    other axes has its own; None for a scale per channel or tensor."""

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest integer."""
        return LIMITS[self.dtype]

    def in_uint8(self) -> "Grid":
        """The same grid of uint8, with 128 added to all integers, if this is of int8.

        A grid of another dtype is returned as it is.
        """
        if self.dtype != "int8":
            return self
        higher = self.zero_point + 128
        return dataclasses.replace(self, dtype="uint8", zero_point=higher)

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
        zero_point = self._spread(self.grid.zero_point)
        return jnp.asarray(self.qvalue).astype(jnp.int32) - zero_point

    def _spread(self, x: Any) -> Any:
        """A scale or zero point in a shape that broadcasts to the integers."""
        axis, block = self.grid.axis, self.grid.block
        if axis is None or not np.ndim(x):
            return x
        if block is not None:
            size = self.qvalue.shape[axis]
            return lax.slice_in_dim(jnp.repeat(x, block, axis), 0, size, axis=axis)
        shape = [1] * jnp.ndim(self.qvalue)
        shape[axis] = -1
        return x.reshape(shape)

    def dequant(self) -> jax.Array:
        """Dequantizes: ``float32(q - zero_point) * scale``.

        Source: XNNPACK, ``qs8-f32-vcvt``; TFLite computes the same.
        """
        scale = self._spread(jnp.asarray(self.grid.scale, jnp.float32))
        return self.centered.astype(jnp.float32) * scale

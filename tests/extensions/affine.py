"""A user's own affine grid and the calibration that goes with it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics


@config.register
@dataclasses.dataclass(frozen=True)
class AffineUint8(numerics.Numerics):
    """0 to 255, with a zero point."""

    @property
    def bound(self):
        return 255.0

    @property
    def storage_dtype(self):
        return np.dtype("uint8")

    @property
    def zero_point_range(self):
        return 0, 255

    def round(self, scaled, noise):
        return jnp.round(scaled).astype(jnp.int32)


@config.register
@dataclasses.dataclass(frozen=True)
class OwnMinMax(calibration.Calibration):
    """From the smallest value to the largest."""

    def range(self, x, axes, grid, state):
        low, high = x.min(axes, keepdims=True), x.max(axes, keepdims=True)
        return calibration.Range(high, low)


TENSOR = config.Tensor(numerics=AffineUint8(), calibration=OwnMinMax())

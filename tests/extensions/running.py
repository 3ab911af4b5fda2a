"""A user's own calibration with state: the largest magnitude of all batches so far."""

import dataclasses

import jax.numpy as jnp

from aqtlite import calibration, config, numerics


@config.register
@dataclasses.dataclass(frozen=True)
class RunningAbsMax(calibration.Calibration):
    """The maximum over batches."""

    @property
    def has_state(self):
        return True

    def init_state(self, shape, grid):
        return {"largest": jnp.zeros(shape)}

    def update(self, statistics, x, axes, grid):
        found = calibration.AbsMax().bound(x, axes)
        return {"largest": jnp.maximum(statistics.state["largest"], found)}

    def range(self, x, axes, grid, statistics):
        return calibration.Range(statistics.state["largest"])


TENSOR = config.Tensor(
    numerics=numerics.IntSymmetric(bits=8),
    calibration=RunningAbsMax(),
    calib_shared_axes="per_tensor",
)

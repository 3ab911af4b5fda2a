"""The model whose variables the files in this folder hold."""

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)

_PERIODIC = calibration.Periodic(of=calibration.AbsMax(), period=2)
_AFFINE = {
    "fwd.lhs.numerics": numerics.IntAffine(bits=8),
    "fwd.lhs.calibration": calibration.MovingAverage(of=calibration.MinMax()),
    "fwd.lhs.calib_shared_axes": "per_tensor",
}
_DELAYED = calibration.DelayedScaling(length=2)

CONFIGS = {
    "largest": config.static_int8(calibration.MaxOverBatches()),
    "affine": config.update(config.fully_quantized(), _AFFINE),
    "delayed": config.update(
        config.fp8(delayed=True, per_tensor=True), {"*.lhs.calibration": _DELAYED}
    ),
    "periodic": config.static_int8(_PERIODIC),
    "smooth": config.smoothquant(statistic=_DELAYED),
}


class Layers(nn.Module):
    """A layer for each config."""

    configs: tuple[str, ...] = tuple(CONFIGS)

    @nn.compact
    def __call__(self, x):
        for name in self.configs:
            dot_general = AqtDotGeneral(CONFIGS[name])
            x = nn.Dense(4, dot_general=dot_general, name=name)(x)
        return x


SERVED = Layers(("largest", "smooth"))


class Mlp(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.down = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

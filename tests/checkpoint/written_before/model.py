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


class Computed(nn.Module):
    """Layers whose weights are computed from several parameters."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (8, 4, 2))
        a = self.param("a", nn.initializers.normal(), (8, 2))
        b = self.param("b", nn.initializers.normal(), (2, 8))
        flat = w.reshape(8, 8).T
        x = x @ ((flat - flat.mean(0)) / jnp.sqrt(flat.var(0) + 1e-5))
        both = jnp.concatenate([flat[:, ::-1], flat], 1)
        x = nn.relu(x) @ (both[:, 4:12] + a @ b).astype(jnp.float32)
        return nn.DenseGeneral((2, 4), name="out")(x)

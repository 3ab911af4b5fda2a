"""A user's own grid by table: -1, 0 and 1 with a threshold (ternary weights)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from aqtlite import config, numerics


@config.register
@dataclasses.dataclass(frozen=True)
class Ternary(numerics.Numerics):
    """Codes 0, 1 and 2 for -1, 0 and 1."""

    threshold: float = 0.5

    @property
    def bound(self):
        return 1.0

    @property
    def storage_dtype(self):
        return np.dtype("uint8")

    @property
    def name(self):
        return "ternary"

    @property
    def arithmetic(self):
        return "table"

    def round(self, scaled, noise):
        sign = jnp.where(jnp.abs(scaled) < self.threshold, 0, jnp.sign(scaled))
        return (sign + 1).astype(jnp.uint8)

    def decode(self, stored):
        return jnp.array([-1.0, 0.0, 1.0])[stored]


TENSOR = config.Tensor(numerics=Ternary())

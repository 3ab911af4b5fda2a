"""A user's own float grid, stored as what it is."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from aqtlite import config, numerics


@config.register
@dataclasses.dataclass(frozen=True)
class E4M3(numerics.Numerics):
    """The float8 of four exponent bits, saturating."""

    @property
    def bound(self):
        return 448.0

    @property
    def storage_dtype(self):
        return np.dtype(jnp.float8_e4m3fn)

    def round(self, scaled, noise):
        return jnp.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn)


TENSOR = config.Tensor(numerics=E4M3())

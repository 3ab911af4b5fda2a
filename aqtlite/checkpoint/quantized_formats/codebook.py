"""A grid of 16 values that a file brings along."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.numerics import Numerics
from aqtlite.shapes.sharding import looked_up


@config.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Codebook(Numerics):
    """Sixteen values by code, in any order: stored as uint4, decoded by table.

    >>> grid = Codebook(values=tuple(float(i % 8) for i in range(16)))
    >>> grid.decode(jnp.array([3, 9], jnp.uint4)).tolist()
    [3.0, 1.0]
    """

    values: tuple[float, ...]
    """The value of each code, exact in float32."""

    @property
    def bound(self) -> float:
        return max(map(abs, self.values))

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype("uint4"))

    @property
    def name(self) -> str:
        return "codebook"

    @property
    def arithmetic(self) -> Literal["table"]:
        return "table"

    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        del noise
        distance = jnp.abs(scaled[..., None] - jnp.asarray(self.values, jnp.float32))
        return jnp.argmin(distance, axis=-1).astype(self.storage_dtype)

    def decode(self, stored: jax.Array) -> jax.Array:
        return looked_up(
            jnp.asarray(self.values, jnp.float32), stored.astype(jnp.uint32)
        )

"""A user's own source of noise."""

import dataclasses

import jax.numpy as jnp

from aqtlite import config, noise


@config.register
@dataclasses.dataclass(frozen=True)
class Alternating(noise.Noise):
    """One draw for all elements, from the first word of the seed."""

    shift: int = 0

    def bits(self, shape, seed):
        word = seed[0] << self.shift
        return jnp.broadcast_to(word, shape)

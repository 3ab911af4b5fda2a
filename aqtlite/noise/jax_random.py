"""Noise by JAX's own generator."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.noise import base
from aqtlite.shapes.sharding import replicated


@dataclasses.dataclass(frozen=True)
class JaxRandom(base.Noise):
    """The bits of `jax.random.bits`, with the seed as a Threefry key.

    Threefry 2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
    is tested far more thoroughly than `CounterHash`, and takes several times as long:
    20 rounds for each pair of elements. Symbolic sizes are not supported.

    >>> JaxRandom().bits((2, 3), jnp.array([3, 7], jnp.uint32)).shape
    (2, 3)
    """

    def bits(self, shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
        if seed.ndim == 1:
            return _bits(seed, shape)
        # Axes with an explicit sharding could not be merged.
        seed = replicated(seed)
        channels = seed.shape[1:]
        inner = tuple(
            1 if one != 1 else size for size, one in zip(shape, channels, strict=True)
        )
        words = jnp.moveaxis(seed, 0, -1).reshape(math.prod(channels), 2)
        # Channels with equal seeds, as with a constant bound, need different noise.
        index = lax.broadcasted_iota(jnp.uint32, words.shape, 0)
        words = words + index * np.array([0, 1], np.uint32)
        each = jax.vmap(_bits, (0, None))(words, inner)
        # Each axis is either one of channels or one within a channel.
        rank = len(shape)
        each = each.reshape(*channels, *inner)
        order = [axis for i in range(rank) for axis in (i, rank + i)]
        return each.transpose(order).reshape(shape)


def _bits(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.bits(key, shape, jnp.uint32)

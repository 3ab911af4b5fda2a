"""Noise by a hash of the element's index and a seed.

A counter-based generator needs no state and no extra pass over memory: XLA computes it
inside the rounding itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.elementwise import Elementwise, spread
from aqtlite.lowering.target import TargetDependent
from aqtlite.noise import base, mixer


@dataclasses.dataclass(frozen=True)
class CounterHash(base.Noise):
    """A hash of each element's index and the seed, computed inside the rounding.

    For an element at index ``i`` in row-major order and a seed ``(s0, s1)``, the bits
    are ``mix(i + s0) * (s1 | 1)`` modulo 2^32, where ``mix`` is an integer mixer with
    two multiplications: a counter-based generator, like those of Salmon et al. 2011,
    "Parallel random numbers: as easy as 1, 2, 3", but with far fewer steps. It takes no
    memory and hardly any time, and is not for cryptography.

    >>> CounterHash().bits((2, 3), jnp.array([3, 7], jnp.uint32)).shape
    (2, 3)
    """

    def bits(self, shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
        return random_bits(shape, seed)


def random_bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Returns uniform bits, which depend on each element's index and the seed alone.

    Args:
        shape: shape of the array to be rounded.
        seed: uint32 of shape ``(2,)``, or ``(2, *channels)`` with one seed for each
            channel, where `channels` broadcasts to `shape`.

    Returns:
        uint32 of `shape`; the high bits are the most random.
    """
    return _bits_of(shape, seed) if seed.ndim == 1 else _RandomBits(shape)(seed)


@dataclasses.dataclass(frozen=True)
class _RandomBits(TargetDependent):
    """The bits of each element from the seed of its channel."""

    shape: tuple[int, ...]

    def reference(self, seed):
        return _bits_of(self.shape, seed)

    def lowered(self, target, seed):
        if target.partitions > 1:
            # Seeds on other devices than their elements move once.
            seed = jnp.broadcast_to(seed, (2, *self.shape))
        return _bits_of(self.shape, seed)


def _bits_of(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    first, second = (lax.index_in_dim(seed, i, keepdims=False) for i in (0, 1))
    return _HASH(_position(shape, first), second)


def _hash(position: jax.Array, second: jax.Array) -> jax.Array:
    # Without the second word, seeds would give shifts of the same bits. The high bits
    # of a product depend on all bits of both factors.
    return lax.mul(mixer.mix(position), lax.bitwise_or(second, np.uint32(1)))


_HASH = Elementwise(_hash)


def _position(shape: tuple[int, ...], first: jax.Array) -> jax.Array:
    """Adds each element's index in row-major order to `first`, modulo 2^32.

    Every array of `shape` depends on `first`: XLA hoists constants out of a loop, and
    would keep an array of indices in memory for as long as the loop runs.
    """
    position, stride = spread(first, shape), np.uint32(1)
    for axis, size in reversed([*enumerate(shape)]):
        along = lax.broadcasted_iota(jnp.uint32, (size,), 0) * stride
        position += lax.broadcast_in_dim(along, shape, (axis,))
        stride = stride * _as_uint32(size)
    return position


def _as_uint32(size: Any) -> Any:
    if isinstance(size, int):
        return np.uint32(size & 0xFFFFFFFF)
    return jnp.asarray(size).astype(jnp.uint32)

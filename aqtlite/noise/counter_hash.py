"""Noise by a hash of the element's index and a seed.

A counter-based generator needs no state and no extra pass over memory: XLA computes it
inside the rounding itself.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.elementwise import Elementwise
from aqtlite.lowering.target import TargetDependent
from aqtlite.noise import base, mixer


@dataclasses.dataclass(frozen=True)
class CounterHash(base.Noise):
    """A hash of each element's index and the seed, computed inside the rounding.

    For an element at index ``i`` in row-major order and a seed ``(s0, s1)``, the bits
    are ``mix((n * s1 + i) ^ s0) * (s1 | 1)`` modulo 2^32, where ``n`` is the number of
    elements per index of the first axis, and ``mix`` is an integer mixer with two
    multiplications: a counter-based generator, like those of Salmon et al. 2011,
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
    # Without the second word, all seeds would give permutations of the same bits. The
    # high bits of a product depend on all bits of both factors.
    if seed.ndim == 1:
        return _bits_of(shape, seed)
    return _RandomBits(shape)(seed)


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
    index = [lax.broadcasted_iota(jnp.uint32, shape, i) for i in range(len(shape))]
    return _HASH(first, second, *index, *map(_as_uint32, shape))


def _hash(first: jax.Array, second: jax.Array, *index: jax.Array) -> jax.Array:
    """Hashes each element's position, and the words of its seed.

    Args:
        first: first word.
        second: second word.
        index: index of each element along each axis, followed by the size of each axis.
    """
    rank = len(index) // 2
    position = _position(index[:rank], index[rank:], first=second)
    bits = mixer.mix(lax.bitwise_xor(position, first))
    return lax.mul(bits, lax.bitwise_or(second, np.uint32(1)))


_HASH = Elementwise(_hash)


def _position(
    index: Sequence[jax.Array], sizes: Sequence[jax.Array], first: jax.Array
) -> jax.Array:
    """Each element's position in row-major order, plus `first`, modulo 2^32.

    Every step depends on `first`: XLA hoists constants out of a loop, and would keep an
    array of indices in memory for as long as the loop runs.
    """
    position = first
    for axis, (place, size) in enumerate(zip(index, sizes, strict=True)):
        if axis > 0:  # The size of the first axis does not matter.
            position = lax.mul(position, size)
        position = lax.add(position, place)
    return position


def _as_uint32(size: Any) -> Any:
    if isinstance(size, int):
        return np.uint32(size)
    return jnp.asarray(size).astype(jnp.uint32)

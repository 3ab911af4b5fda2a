"""Noise by a hash of the element's index and a seed.

A counter-based generator needs no state and no extra pass over memory: XLA computes it
inside the rounding itself.
"""

import dataclasses
import math
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
    own = tuple(axis for axis, size in enumerate(seed.shape[1:]) if size != 1)
    first, second = (_word(seed, number) for number in (0, 1))
    # Without the second word, seeds would give shifts of the same bits. The high bits
    # of a product depend on all bits of both factors.
    odd = lax.broadcast_in_dim(lax.bitwise_or(second, np.uint32(1)), shape, own)
    return lax.mul(_MIX(_position(shape, first, own)), odd)


_MIX = Elementwise(mixer.mix)


def _word(seed: jax.Array, number: int) -> jax.Array:
    """Returns a word of each seed, without axes of size one."""
    word = lax.slice_in_dim(seed, number, number + 1)
    ones = [axis for axis, size in enumerate(word.shape) if size == 1]
    return lax.squeeze(word, ones)


def _position(
    shape: tuple[int, ...], first: jax.Array, own: tuple[int, ...]
) -> jax.Array:
    """Adds each element's index in row-major order to `first`, modulo 2^32.

    Every array of `shape` depends on `first`: XLA hoists constants out of a loop, and
    would keep an array of indices in memory for as long as the loop runs.

    Args:
        shape: shape of the result.
        first: uint32, with the axes `own` of the result.
        own: axes of the result.
    """
    for axes in _runs(shape, own):
        along = tuple(map(own.index, axes))
        first += lax.broadcast_in_dim(_index(shape, axes), first.shape, along)
    position = lax.broadcast_in_dim(first, shape, own)
    others = tuple(axis for axis in range(len(shape)) if axis not in own)
    for axes in _runs(shape, others):
        position += lax.broadcast_in_dim(_index(shape, axes), shape, axes)
    return position


# Elements of the largest array of indices that may stay in memory.
_LARGEST_INDEX = 2**16


def _runs(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Joins adjacent axes, so that their indices are added as one array."""
    runs: list[tuple[int, ...]] = []
    for axis in axes:
        joined = (*runs[-1], axis) if runs and runs[-1][-1] == axis - 1 else (axis,)
        sizes = [shape[one] for one in joined]
        is_known = all(isinstance(size, int) for size in sizes)
        if len(joined) > 1 and is_known and math.prod(sizes) <= _LARGEST_INDEX:
            runs[-1] = joined
        else:
            runs.append((axis,))
    return runs


def _index(shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Returns the part of the index in row-major order that adjacent axes add."""
    sizes = tuple(shape[axis] for axis in axes)
    stride = math.prod(shape[axes[-1] + 1 :])
    index = lax.broadcasted_iota(jnp.uint32, (math.prod(sizes),), 0)
    if not (isinstance(stride, int) and stride == 1):
        index *= _as_uint32(stride)
    return lax.reshape(index, sizes)


def _as_uint32(size: Any) -> Any:
    if isinstance(size, int):
        return np.uint32(size & 0xFFFFFFFF)
    return jnp.asarray(size).astype(jnp.uint32)

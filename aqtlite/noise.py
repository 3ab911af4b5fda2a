"""The noise that stochastic rounding adds: a hash of the element's index and a seed.

A counter-based generator needs no state and no extra pass over memory: XLA computes
it inside the rounding itself. The integer mixer is of the kind of MurmurHash3's
finalizer, with the constants of C. Wellons' "hash prospector" (lowbias32).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.lowering.target import TargetDependent

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive salts.


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit moves about half the outputs."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def seed_from_key(key: jax.Array) -> jax.Array:
    """A seed from a JAX random key, typed or raw.

    Args:
        key: ``jax.random.key(...)``, or the uint32 vector of ``jax.random.PRNGKey``.

    Returns:
        uint32 of shape ``(2,)``.

    Raises:
        TypeError: if `key` is neither.

    >>> seed_from_key(jax.random.key(0)).shape
    (2,)
    """
    if not hasattr(key, "dtype"):
        raise TypeError(f"key must be a jax.random key, got {type(key).__name__}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape:
            raise TypeError(f"key must be a single key, got keys of shape {key.shape}")
        data = jax.random.key_data(key)
    elif key.dtype == jnp.uint32 and key.ndim == 1:
        data = key
    else:
        raise TypeError(
            "key must be jax.random.key(...) or jax.random.PRNGKey(...), got "
            f"{key.dtype} of shape {key.shape}"
        )
    return _seed_from_words(data)


@jax.jit
def _seed_from_words(words: jax.Array) -> jax.Array:
    place = _mix(lax.iota(jnp.uint32, words.size))
    return _two_words(jnp.sum(_mix(words + place), dtype=jnp.uint32))


@jax.jit
def seed_from_bounds(bound: jax.Array, *others: jax.Array) -> jax.Array:
    """A seed for each channel, from what calibration found in it.

    No element is read, and nothing is summed over channels or devices: the bounds are
    there anyway, and change with the array.

    Args:
        bound: float32; the bound of each channel, of size 1 along the others.
        others: float32, more that tells channels apart (the scales of the forward
            pass, say); each broadcasts to the shape of `bound`. Their order matters.

    Returns:
        uint32 of shape ``(2, *bound.shape)``.
    """
    total = _mix(lax.bitcast_convert_type(bound, jnp.uint32) + np.uint32(_GOLDEN))
    for other in others:
        total = _mix(total + lax.bitcast_convert_type(other, jnp.uint32))
    return exact.fusion_barrier(_two_words(total))


@functools.partial(jax.jit, static_argnums=1)
def fold_in(seed: jax.Array, salt: int) -> jax.Array:
    """Other seeds, independent of the first ones, for each salt."""
    return _mix(seed + np.uint32((_GOLDEN * (salt + 1)) & 0xFFFFFFFF))


def _two_words(total: jax.Array) -> jax.Array:
    words = np.array([1, _GOLDEN], np.uint32).reshape(2, *(1,) * total.ndim)
    return _mix(total + words)


def _flat_index(shape: tuple[int, ...], first: jax.Array) -> jax.Array:
    """Each element's position in row-major order, counted from anywhere, modulo 2^32.

    Every step depends on `first`: XLA takes what depends on nothing out of a loop, and
    would keep an array of indices in memory for as long as the loop runs.
    """
    index = jnp.broadcast_to(first, shape)
    for axis, size in enumerate(shape):
        if axis > 0:  # The size of the first one does not matter.
            is_known = isinstance(size, int)
            index = index * (np.uint32(size) if is_known else _as_uint32(size))
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def _as_uint32(symbolic_size: Any) -> jax.Array:
    return jnp.asarray(symbolic_size).astype(jnp.uint32)


def random_bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Uniform bits, a function of each element's index and the seed alone.

    Args:
        shape: the shape of the array to be rounded.
        seed: uint32 of shape ``(2,)``, or ``(2, *channels)`` with one for each
            channel, where `channels` broadcasts to `shape`.

    Returns:
        uint32 of `shape`, of which the high bits are the good ones.
    """
    # Without the second word, every seed would give the same bits in another order. The
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
            # Seeds that lie on other devices than what they are for move once.
            seed = jnp.broadcast_to(seed, (2, *self.shape))
        return _bits_of(self.shape, seed)


def _bits_of(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    index = _flat_index(shape, first=seed[1])
    return _mix(index ^ seed[0]) * (seed[1] | np.uint32(1))

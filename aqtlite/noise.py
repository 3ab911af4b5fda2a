"""The noise that stochastic rounding adds: a hash of the element's index and a seed.

A counter-based generator needs no state and no extra pass over memory: XLA computes
it inside the rounding itself. The integer mixer is of the kind of MurmurHash3's
finalizer, with the constants of C. Wellons' "hash prospector" (lowbias32).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import reduction

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
def seed_from_bits(x: jax.Array, *others: jax.Array) -> jax.Array:
    """A seed that changes when any bit of an array changes.

    Args:
        x: float32, any shape.
        others: float32, any shapes, whose largest values go into the seed too. Their
            order matters.

    Returns:
        uint32 of shape ``(2,)``. The sum that makes it wraps, so that the order of
        summation, and with it the sharding of x, does not matter.
    """
    words = lax.bitcast_convert_type(x, jnp.uint32)
    # The array is read once, with little arithmetic.
    spread = (words * np.uint32(_GOLDEN)) ^ (words >> 15)
    if x.ndim:
        place = lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
        spread = spread * (place * np.uint32(_GOLDEN - 1) + np.uint32(1))
    total = reduction.wrapping_sum(spread)
    for other in others:
        largest = jnp.max(other, initial=-jnp.inf)
        total = _mix(total + lax.bitcast_convert_type(largest, jnp.uint32))
    return _two_words(total)


@functools.partial(jax.jit, static_argnums=1)
def fold_in(seed: jax.Array, salt: int) -> jax.Array:
    """Another seed, independent of the first, for each salt."""
    return _mix(seed + np.uint32((_GOLDEN * (salt + 1)) & 0xFFFFFFFF))


def _two_words(total: jax.Array) -> jax.Array:
    return _mix(total + np.array([1, _GOLDEN], np.uint32))


def _flat_index(shape: tuple[int, ...], first: jax.Array) -> jax.Array:
    """Each element's position in row-major order, counted from anywhere, modulo 2^32.

    Every step depends on `first`: XLA takes what depends on nothing out of a loop, and
    would keep an array of indices in memory for as long as the loop runs.
    """
    index = jnp.broadcast_to(first, shape)
    for axis, size in enumerate(shape):
        if axis > 0:  # The first one's size, which may be symbolic, does not matter.
            index = index * np.uint32(size)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def random_bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Uniform bits, a function of each element's index and the seed alone.

    Args:
        shape: the shape of the array to be rounded.
        seed: uint32 of shape ``(2,)``.

    Returns:
        uint32 of `shape`, of which the high bits are the good ones.
    """
    # Without the second word, every seed would give the same bits in another order. The
    # high bits of a product depend on all bits of both factors.
    index = _flat_index(shape, first=seed[1])
    return _mix(index ^ seed[0]) * (seed[1] | np.uint32(1))

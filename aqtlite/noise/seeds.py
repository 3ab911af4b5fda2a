"""Seeds of noise: of a key, of what calibration found, and for each use of them."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.noise import mixer


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
    place = mixer.mix(lax.iota(jnp.uint32, words.size))
    return _two_words(jnp.sum(mixer.mix(words + place), dtype=jnp.uint32))


@functools.partial(jax.jit, static_argnames="salt")
def seed_from_bounds(
    bound: jax.Array, *others: jax.Array, salt: int | None = None
) -> jax.Array:
    """A seed for each channel, from what calibration found in it.

    No element is read, and nothing is summed over channels or devices: the bounds are
    there anyway, and change with the array.

    Args:
        bound: float32; the bound of each channel, of size 1 along the others.
        others: float32, more that tells channels apart (the scales of the forward
            pass, say); each broadcasts to the shape of `bound`. Their order matters.
        salt: What is folded in (`fold_in`); None for nothing.

    Returns:
        uint32 of shape ``(2, *bound.shape)``, computed once for a channel, not again
        for each of its elements.
    """
    bits = lax.bitcast_convert_type(bound, jnp.uint32)
    total = mixer.mix(lax.add(bits, np.uint32(mixer.GOLDEN)))
    for other in others:
        bits = lax.bitcast_convert_type(other, jnp.uint32)
        total = mixer.mix(lax.add(total, bits))
    seed = _two_words(total)
    return exact.fusion_barrier(seed if salt is None else fold_in(seed, salt))


@functools.partial(jax.jit, static_argnums=1)
def fold_in(seed: jax.Array, salt: int) -> jax.Array:
    """Other seeds, independent of the first ones, for each salt."""
    word = np.uint32((mixer.GOLDEN * (salt + 1)) & 0xFFFFFFFF)
    return mixer.mix(lax.add(seed, word))


def _two_words(total: jax.Array) -> jax.Array:
    words = np.array([1, mixer.GOLDEN], np.uint32).reshape(2, *(1,) * total.ndim)
    return mixer.mix(total + words)


def shared_along(seed: jax.Array, axes: Iterable[int]) -> jax.Array:
    """Makes one seed of those of the channels along some axes.

    Args:
        seed: uint32 of shape ``(2,)``, which stays as it is, or ``(2, *channels)``.
        axes: axes of the array whose channels they are, not negative.

    Returns:
        uint32, with size 1 along `axes`: the sum, which has no order.
    """
    several = tuple(axis + 1 for axis in axes if seed.ndim > 1)
    several = tuple(axis for axis in several if seed.shape[axis] != 1)
    if not several:
        return seed
    return jnp.sum(seed, axis=several, keepdims=True, dtype=jnp.uint32)

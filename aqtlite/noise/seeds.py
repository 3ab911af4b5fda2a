"""Seeds of noise, from a key or from calibration, and seeds derived from them."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.lowering.elementwise import Elementwise
from aqtlite.noise import mixer


def seed_from_key(key: jax.Array) -> jax.Array:
    """Returns a seed from a JAX random key, typed or raw.

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


def seed_from_bounds(
    bound: jax.Array, *others: jax.Array, salt: int | None = None
) -> jax.Array:
    """Returns a seed for each channel, from the bound that calibration found.

    No element is read, and nothing is summed over channels or devices: the bounds are
    computed anyway, and change with the array.

    Args:
        bound: float32, the bound of each channel, keepdims.
        others: further float32 arrays that distinguish channels, such as the scales of
            the forward pass; each broadcasts to the shape of `bound`. Their order
            matters.
        salt: number that gives other seeds, not negative; None for none.

    Returns:
        uint32 of shape ``(2, *bound.shape)``. Other values give other seeds, whose bits
        are not random: a source of noise mixes them.
    """
    word = exact.on_squeezed(Elementwise(_combined, (salt,)), bound, *others)
    # XLA passes over the program once more for each reshape that it can move.
    return jnp.stack([word, exact.on_squeezed(_TIMES_GOLDEN, word)])


def _combined(salt: int | None, *values: jax.Array) -> jax.Array:
    first, *others = (lax.bitcast_convert_type(x, jnp.uint32) for x in values)
    order = 1 if salt is None else salt + 2
    total = lax.add(first, np.uint32((mixer.GOLDEN * order) & 0xFFFFFFFF))
    for word in others:
        total = lax.add(mixer.multiply(total), word)
    return total


def _times_golden(word: jax.Array) -> jax.Array:
    return lax.mul(word, np.uint32(mixer.GOLDEN))


_TIMES_GOLDEN = Elementwise(_times_golden)


def fold_in(seed: jax.Array, salt: int) -> jax.Array:
    """Returns new seeds, independent of the given seeds and of other salts' seeds."""
    return Elementwise(_folded, (salt,))(seed)


def _folded(salt: int, seed: jax.Array) -> jax.Array:
    word = np.uint32((mixer.GOLDEN * (salt + 1)) & 0xFFFFFFFF)
    return mixer.mix(lax.add(seed, word))


def _two_words(total: jax.Array) -> jax.Array:
    return mixer.mix(total + np.array([1, mixer.GOLDEN], np.uint32))


def shared_along(seed: jax.Array, axes: Iterable[int]) -> jax.Array:
    """Merges the seeds of channels along some axes into one.

    Args:
        seed: uint32 of shape ``(2, *channels)``; or ``(2,)``, which is returned as is.
        axes: axes of the array, not negative.

    Returns:
        uint32, with size 1 along `axes`: the sums, which do not depend on an order.
    """
    several = tuple(axis + 1 for axis in axes if seed.ndim > 1)
    several = tuple(axis for axis in several if seed.shape[axis] != 1)
    if not several:
        return seed
    return jnp.sum(seed, axis=several, keepdims=True, dtype=jnp.uint32)

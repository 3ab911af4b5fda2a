"""The integer hash behind seeds and noise."""

import jax
import numpy as np
from jax import lax

GOLDEN = 0x9E3779B9
"""2^32 / golden ratio: spreads consecutive salts."""


def mix(x: jax.Array) -> jax.Array:
    """Mixes uint32: a bijection in which each input bit flips about half the output.

    It has the form of MurmurHash3's finalizer, with the constants of C. Wellons' "hash
    prospector" (lowbias32).
    """
    x = lax.mul(_with_high_bits(multiply(x), 15), np.uint32(0x846CA68B))
    return _with_high_bits(x, 16)


def multiply(x: jax.Array) -> jax.Array:
    """Does the first step of `mix`, a bijection: high bits reach low bits, and back."""
    return lax.mul(_with_high_bits(x, 16), np.uint32(0x7FEB352D))


def _with_high_bits(x: jax.Array, distance: int) -> jax.Array:
    """Returns ``x ^ (x >> distance)``."""
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(distance)))

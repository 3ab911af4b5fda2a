"""The integer hash that seeds and noise are made of."""

import jax
import numpy as np

GOLDEN = 0x9E3779B9
"""2^32 / golden ratio: spreads consecutive salts."""


def mix(x: jax.Array) -> jax.Array:
    """Mixes uint32: a bijection in which every input bit moves about half the outputs.

    It is of the kind of MurmurHash3's finalizer, with the constants of C. Wellons'
    "hash prospector" (lowbias32).
    """
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)

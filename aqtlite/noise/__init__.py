"""The noise of stochastic rounding: its sources, and their seeds.

A source is a frozen dataclass that maps a seed to random bits. Without a key, the seed
comes from the calibration of the array that is rounded. Read `base` first.
"""

from aqtlite.noise.base import Noise
from aqtlite.noise.counter_hash import CounterHash, random_bits
from aqtlite.noise.jax_random import JaxRandom
from aqtlite.noise.seeds import fold_in, seed_from_bounds, seed_from_key, shared_along

__all__ = [
    "CounterHash",
    "JaxRandom",
    "Noise",
    "fold_in",
    "random_bits",
    "seed_from_bounds",
    "seed_from_key",
    "shared_along",
]

"""A quantized KV cache, and attention to it.

Keys and values have one scale per position and head. Attention contracts the stored
integers:

- scores: ``sum_d q_d (s k_d) = s sum_d q_d k_d``: the scale of a key multiplies its
  score;
- values: ``sum_t p_t (s_t v_t) = sum_t (p_t s_t) v_t``: the scale of a value multiplies
  its probability before the probability is quantized
  (`aqtlite.contraction.scale_moves`).

Gradients pass through the rounding of keys and values as through that of any operand
(`aqtlite.contraction.straight_through`).

`aqtlite.flax.QuantizedCache` puts the cache into Flax layers.

>>> import jax.numpy as jnp
>>> cfg = config_for(8)
>>> cache = empty((2, 16, 4, 8), jnp.float32, cfg)
>>> cache = append(cache, jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 4, 8)), cfg)
>>> attend(jnp.ones((2, 1, 4, 8)), cache, cfg).shape
(2, 1, 4, 8)

Read `cache` first.
"""

from aqtlite.kv_cache.appending import append
from aqtlite.kv_cache.attention import attend, attend_uncached
from aqtlite.kv_cache.cache import KVCache, empty
from aqtlite.kv_cache.configs import check_config, config_for
from aqtlite.kv_cache.packed import Packed
from aqtlite.kv_cache.sequences import (
    concatenate,
    grow,
    insert,
    positions,
    take,
    truncate,
)

__all__ = [
    "KVCache",
    "Packed",
    "append",
    "attend",
    "attend_uncached",
    "check_config",
    "concatenate",
    "config_for",
    "empty",
    "grow",
    "insert",
    "positions",
    "take",
    "truncate",
]

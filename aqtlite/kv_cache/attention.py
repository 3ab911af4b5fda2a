"""Dot-product attention to quantized keys and values."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.contraction.einsum import einsum
from aqtlite.kv_cache import cache as cache_lib
from aqtlite.kv_cache.cache import KVCache
from aqtlite.qtensor.qtensor import QTensor


def attend(
    query: jax.Array,
    cache: KVCache,
    cfg: config.DotGeneral,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Causal dot-product attention of the last positions to all positions written.

    With fewer key heads than query heads (grouped-query attention), each key head
    serves a group of consecutive query heads.

    Args:
        query: queries of the positions written last, ``(*batch, positions, query heads,
            depth)``; each position attends to itself and to all earlier ones.
        cache: cache that already holds the keys and values of these positions.
        cfg: config that the cache was made with.
        mask: True where attended; broadcasts to ``(*batch, query heads, positions,
            length)``.

    Returns:
        ``(*batch, positions, query heads, value depth)``, in the dtype of `query`.

    Raises:
        TypeError: if a gradient is asked with respect to keys and values of a cache
            without `KVCache.floats`.
        ValueError: if a shape does not match, or the cache is of another config.
    """
    cache = cache_lib.checked(cache, cfg)
    positions = cache.index - query.shape[-3] + jnp.arange(query.shape[-3])
    causal = jnp.arange(cache.length) <= positions[:, None]
    masks = (causal,) if mask is None else (mask, causal)
    return _attend(query, *cache_lib.differentiable(cache), cfg, masks)


def attend_uncached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cfg: config.DotGeneral,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Dot-product attention to keys and values quantized as in a cache.

    Args:
        query: queries, ``(*batch, positions, query heads, depth)``.
        key: keys, ``(*batch, length, heads, depth)``.
        value: values, ``(*batch, length, heads, value depth)``.
        cfg: config of the cache.
        mask: as for `attend`; without one, every position attends to all.
    """
    masks = () if mask is None else (mask,)
    keys, values = (
        cache_lib.quantize_keys(key, cfg),
        cache_lib.quantize_values(value, cfg),
    )
    return _attend(query, keys, values, cfg, masks)


def _attend(
    query: jax.Array,
    key: QTensor,
    value: QTensor,
    cfg: config.DotGeneral,
    masks: tuple[jax.Array, ...],
) -> jax.Array:
    *batch, count, query_heads, depth = query.shape
    heads = key.shape[-2]
    if (*batch, depth) != (*key.shape[:-3], key.shape[-1]) or query_heads % heads:
        raise ValueError(
            f"query of shape {query.shape} does not fit keys of shape {key.shape}: "
            "batch axes and depth are to be equal, and the heads of the query a "
            "multiple of those of the keys"
        )
    cfg = cfg.for_serving()
    group = query_heads // heads
    query = query / jnp.sqrt(depth).astype(query.dtype)
    grouped = query.reshape(*batch, count, heads, group, depth)
    scores: Any = einsum(
        "...qhgd,...khd->...hgqk",
        grouped,
        key,
        cfg=cfg,
        preferred_element_type=jnp.float32,
    )
    for mask in masks:
        mask = _by_group(mask, heads, group, (count, key.shape[-3]))
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    out: Any = einsum(
        "...hgqk,...khd->...qhgd",
        jax.nn.softmax(scores),
        value,
        cfg=config.for_values(cfg),
        preferred_element_type=query.dtype,
    )
    out = out.reshape(*batch, count, query_heads, value.shape[-1])
    return cast(jax.Array, out)


def _by_group(
    mask: jax.Array, heads: int, group: int, last: tuple[int, int]
) -> jax.Array:
    """Splits a mask's axis of query heads, if present, into key heads and groups."""
    mask = jnp.atleast_2d(mask)
    rows, columns = mask.shape[-2:]
    if rows not in (1, last[0]) or columns not in (1, last[1]):
        raise ValueError(
            f"mask of shape {mask.shape} does not broadcast to {last[0]} queries and "
            f"{last[1]} keys, its last two axes; the keys are all the positions that "
            "the cache has room for"
        )
    if mask.ndim == 2:
        return mask
    *batch, own, _, _ = mask.shape
    if own not in (1, heads * group):
        raise ValueError(
            f"mask of shape {mask.shape} does not broadcast to {heads * group} heads"
        )
    split = (1, 1) if own == 1 else (heads, group)
    return mask.reshape(*batch, *split, rows, columns)

"""Dot-product attention to quantized keys and values."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.contraction.einsum import einsum
from aqtlite.kv_cache import checks, configs, quantizing, rotation, slots
from aqtlite.kv_cache.cache import KVCache, differentiable
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes


def attend(
    query: jax.Array,
    cache: KVCache,
    cfg: config.DotGeneral,
    mask: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal dot-product attention of the last positions to all positions written.

    With fewer key heads than query heads (grouped-query attention), each key head
    serves a group of consecutive query heads. What is not attended to does not matter,
    even if it is NaN.

    Args:
        query: queries of the positions written last, ``(*batch, positions, query heads,
            depth)``; each position attends to itself and to all earlier ones, or to
            those in the window of the cache.
        cache: cache that already holds the keys and values of these positions.
        cfg: config that the cache was made with.
        mask: True, or 1, where attended; broadcasts to ``(*batch, query heads,
            positions, length)``, with a column for each slot of the cache
            (`aqtlite.kv_cache.positions`). A position without any is the mean of all.
        scale: factor of the scores, which are float32, as in
            `jax.nn.dot_product_attention` and NNX's attention, which take ``1 /
            sqrt(depth)``. None: the queries are divided by ``sqrt(depth)`` before they
            are quantized, and scores have their dtype, as in Linen's attention.

    Returns:
        ``(*batch, positions, query heads, value depth)``, in the dtype of `query`.

    Raises:
        TypeError: if `query` is not floating, or if a gradient is asked with respect to
            keys and values of a cache without `KVCache.floats`.
        ValueError: if a shape does not match, the cache is of another config, or, as
            far as is known, holds fewer positions than there are queries, or `mask` has
            other numbers than 0 and 1, which make attention NaN where not known.
    """
    cache = checks.checked(cache, cfg)
    keys, values = differentiable(cache)
    _check_query(query, keys, cfg)
    count, index = query.shape[-3], cache.index
    checks.check_count(cache, count)
    checks.check_written(cache, count)
    seen = slots.seen(index, count, cache.length, cache.window)
    if index.ndim:  # The same for all heads.
        seen = seen[..., None, :, :]
    masks = (seen,) if mask is None else (mask, seen)
    return _attend(query, keys, values, cfg, masks, scale)


def attend_uncached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cfg: config.DotGeneral,
    mask: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Dot-product attention to keys and values quantized as in a cache.

    Args:
        query: queries, ``(*batch, positions, query heads, depth)``.
        key: keys, ``(*batch, length, heads, depth)``.
        value: values, ``(*batch, length, heads, value depth)``.
        cfg: config of the cache.
        mask: as for `attend`; without one, every position attends to all.
        scale: as for `attend`.

    Raises:
        TypeError: if `query`, `key` or `value` is not floating.
        ValueError: if a shape does not match, as for `attend` of a mask, or if
            `check_config` rejects the config.
    """
    masks = () if mask is None else (mask,)
    return attend_with_masks(query, key, value, cfg, masks, scale)


def attend_with_masks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cfg: config.DotGeneral,
    masks: tuple[jax.Array, ...],
    scale: float | None,
) -> jax.Array:
    """As `attend_uncached`, to what all masks leave."""
    configs.check_config(cfg)
    checks.check_pair(key, value)
    keys, values = (
        quantizing.quantize_keys(key, cfg),
        quantizing.quantize_values(value, cfg),
    )
    _check_query(query, keys, cfg)
    return _attend(query, keys, values, cfg, masks, scale)


def _attend(
    query: jax.Array,
    key: QTensor,
    value: QTensor,
    cfg: config.DotGeneral,
    masks: tuple[jax.Array, ...],
    scale: float | None,
) -> jax.Array:
    dtype, depth, length = query.dtype, query.shape[-1], key.shape[-3]
    if scale is None:
        query = query / jnp.sqrt(depth).astype(dtype)
    of_scores = dtype if scale is None else np.promote_types(dtype, np.float32)
    scores = _scores(query, key, cfg, of_scores)
    if scale is not None:
        scores = scores * jnp.asarray(scale, scores.dtype)
    *batch, heads, group, count, _ = scores.shape
    # A probability of zero times a scale of NaN would be NaN.
    is_nan = jnp.isnan(value.scale)
    value = dataclasses.replace(value, scale=jnp.where(is_nan, 0, value.scale))
    scores = jnp.where(_by_score(is_nan, value, heads), jnp.nan, scores)
    wanted = (*batch, heads * group, count, length)
    checked = [_by_group(_checked_mask(mask, wanted), heads) for mask in masks]
    for mask in checked:
        attended = mask if mask.dtype == bool else mask != 0
        scores = jnp.where(attended, scores, jnp.finfo(scores.dtype).min)
    for mask in checked:
        if mask.dtype != bool:
            scores = jnp.where(_is_no_mask(mask), jnp.nan, scores)
    probabilities = jax.nn.softmax(scores).astype(dtype)
    return _weighted(probabilities, value, cfg)


def _scores(
    query: jax.Array, key: QTensor, cfg: config.DotGeneral, dtype: Any
) -> jax.Array:
    """Products of queries and keys, ``(*batch, heads, group, positions, length)``."""
    parts = query.shape[-1] // key.shape[-1]
    heads = key.shape[-2] // parts
    rotated = rotation.rotated(query, cfg.fwd.rotation)
    if not cfg.fwd.lhs.is_quantized:
        rotated = rotated.astype(query.dtype)
    by_head = block_shapes.split_axis(rotated, rotated.ndim - 2, heads)
    by_part = block_shapes.split_axis(by_head, by_head.ndim - 1, parts)
    by_part = jnp.swapaxes(by_part, -3, -2)
    key, axes = _as_stored(key)
    scores: Any = einsum(
        f"...qhgd,...{axes}->...hgqk",
        block_shapes.merge_with_next(by_part, by_part.ndim - 4),
        key,
        cfg=configs.of_sums(cfg),
        preferred_element_type=dtype,
    )
    if parts > 1:
        scores = block_shapes.split_axis(scores, scores.ndim - 4, heads).sum(-4)
    return cast(jax.Array, scores)


def _weighted(
    probabilities: jax.Array, value: QTensor, cfg: config.DotGeneral
) -> jax.Array:
    """Sums of values, ``(*batch, positions, query heads, depth)``."""
    heads, dtype, how = probabilities.shape[-4], probabilities.dtype, cfg.fwd.rotation
    parts = value.shape[-2] // heads
    if parts > 1:
        axis = probabilities.ndim - 4
        probabilities = block_shapes.repeat_axis(probabilities, axis, parts)
    value, axes = _as_stored(value)
    out: Any = einsum(
        f"...hgqk,...{axes}->...qhgd",
        probabilities,
        value,
        cfg=config.for_values(configs.of_sums(cfg)),
        preferred_element_type=(
            dtype if how is None else np.promote_types(dtype, np.float32)
        ),
    )
    out = jnp.swapaxes(block_shapes.split_axis(out, out.ndim - 3, heads), -3, -2)
    out = block_shapes.merge_with_next(out, out.ndim - 4)
    out = block_shapes.merge_with_next(out, out.ndim - 2)
    return cast(jax.Array, rotation.rotated_back(out, how).astype(dtype))


def check_no_dropout(dropout_rate: float, *, deterministic: bool) -> None:
    """Raises ValueError if a layer of Flax asks for dropout."""
    if dropout_rate > 0.0 and not deterministic:
        raise ValueError(
            f"dropout_rate={dropout_rate} was asked of attention to a KV cache, which "
            "has none; pass deterministic=True"
        )


def _check_query(query: jax.Array, key: QTensor, cfg: config.DotGeneral) -> None:
    """Raises TypeError or ValueError unless a query fits the keys.

    Args:
        query: the query.
        key: the keys, whose groups of channels are heads.
        cfg: config of the cache.
    """
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError(
            f"query must be floating, got {query.dtype} of shape {query.shape}"
        )
    *of_key, keys, size = key.shape
    *of_query, queries, depth = query.shape
    blocks = cfg.fwd.rhs.blocks
    groups = 1 if blocks is None or not depth else blocks.count_of(depth)
    heads = keys // groups
    fits = len(of_query) == len(of_key) and of_query[:-1] == of_key[:-1]
    is_multiple = heads and keys == heads * groups and queries % heads == 0
    if not (fits and is_multiple and depth and depth == groups * size):
        of_groups = "" if groups == 1 else f" (heads of {groups} groups of channels)"
        raise ValueError(
            f"query of shape {query.shape} does not fit keys of shape {key.shape}"
            f"{of_groups}: batch axes and depth are to be equal, and the heads of the "
            "query a multiple of those of the keys"
        )


def _as_stored(q: QTensor) -> tuple[QTensor, str]:
    """Keys or values in the order of storage, and the names of their last three axes.

    An einsum of other axes would copy what was unpacked.
    """
    order = range(q.ndim) if q.order is None else q.order
    return q.as_stored(), "".join("khd"[axis - q.ndim + 3] for axis in order[-3:])


def _by_score(is_nan: jax.Array, value: QTensor, heads: int) -> jax.Array:
    """Lays out what holds for scales of values as scores: by head and position."""
    is_nan = is_nan.transpose(value.stored_axes)[..., 0]
    by_head = block_shapes.split_axis(is_nan, is_nan.ndim - 1, heads).any(-1)
    return jnp.swapaxes(by_head, -1, -2)[..., None, None, :]


def _checked_mask(mask: jax.Array, of_scores: tuple[int, ...]) -> jax.Array:
    """Returns a mask with two axes or more.

    Args:
        mask: bool, or numbers, 1 where attended and 0 elsewhere.
        of_scores: shape of the scores, ``(*batch, query heads, positions, length)``.

    Raises:
        ValueError: if it does not broadcast to the scores, or has other numbers, as far
            as they are known.
    """
    mask = jnp.atleast_2d(jnp.asarray(mask))
    trailing = of_scores[max(len(of_scores) - mask.ndim, 0) :]
    if mask.ndim > len(of_scores) or any(
        size not in (1, wanted)
        for size, wanted in zip(mask.shape, trailing, strict=True)
    ):
        raise ValueError(
            f"mask of shape {mask.shape} does not broadcast to {of_scores}, (*batch, "
            "query heads, positions, length), where the length is all the positions "
            "that the cache has room for"
        )
    is_known = not isinstance(mask, jax.core.Tracer)
    if is_known and mask.dtype != bool and np.any(_is_no_mask(mask)):
        raise ValueError(
            f"mask of {mask.dtype} and of shape {mask.shape} has numbers other than 1, "
            "where attended, and 0; of a mask that is added to scores, give mask == 0"
        )
    return mask


def _is_no_mask(mask: jax.Array) -> jax.Array:
    return (mask != 0) & (mask != 1)


def _by_group(mask: jax.Array, heads: int) -> jax.Array:
    """Splits a mask's axis of query heads, if present, into key heads and groups."""
    if mask.ndim == 2:
        return mask
    count = 1 if mask.shape[-3] == 1 else heads
    return block_shapes.split_axis(mask, mask.ndim - 3, count)

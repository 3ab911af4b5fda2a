"""Checks of a KV cache, and of what is written and attended to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.kv_cache.cache import KVCache, Stored
from aqtlite.kv_cache.packed import Packed
from aqtlite.quantization.checks import check_floating

_WIDENED = {np.dtype("int4"): np.dtype("int8"), np.dtype("uint4"): np.dtype("uint8")}
"""Storage dtypes before and after `aqtlite.flax.widen_int4`."""


def checked(cache: KVCache, cfg: config.DotGeneral) -> KVCache:
    """The cache, with its storage order adapted to `jax.vmap`.

    Raises:
        ValueError: if the cache is on another grid than the config's, stored in
            another dtype, or rotated otherwise than the config says.
    """
    cache = dataclasses.replace(
        cache, key=_as_mapped(cache.key), value=_as_mapped(cache.value)
    )
    check_index(cache)
    grid, rotation = cfg.for_serving().fwd.rhs.grid, cfg.fwd.rotation
    for name, past in (("keys", cache.key), ("values", cache.value)):
        if past.numerics not in (None, grid):
            changes = "; ".join(config.differences(past.numerics, grid))
            raise ValueError(
                f"a KV cache of shape {past.shape} has {name} of {past.numerics} on "
                f"another grid than fwd.rhs.numerics of the config: {changes}; give "
                "the config that the cache was made with"
            )
        if past.rotation != rotation:
            raise ValueError(
                f"a KV cache of shape {past.shape} has {name} with the rotation "
                f"{past.rotation}, and fwd.rotation of the config is {rotation}; give "
                "the config that the cache was made with"
            )
        if isinstance(past, Packed):
            continue
        stored, wanted = past.qvalue.dtype, grid.storage_dtype
        if stored not in (wanted, _WIDENED.get(wanted)):
            raise ValueError(
                f"a KV cache of shape {past.shape} has {name} stored in {stored}, and "
                f"{grid!r} of fwd.rhs of the config is stored in {wanted}; give the "
                "config that the cache was made with"
            )
    return cache


def check_index(cache: KVCache) -> None:
    """Raises ValueError unless the index has the batch axes, or none."""
    if cache.index.shape not in ((), cache.key.shape[:-3]):
        raise ValueError(
            f"index of shape {cache.index.shape} of a KV cache of shape "
            f"{cache.key.shape}: it is to have the batch axes, or none; map over "
            "layers that are stacked, as by nn.scan (jax.vmap, or "
            "map_caches(..., stacked=1))"
        )


def check_pair(key: jax.Array, value: jax.Array) -> None:
    """Raises TypeError or ValueError unless keys and values are floats that fit."""
    for name, x in (("key", key), ("value", value)):
        check_floating(x, name)
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key of shape {key.shape} and value of shape {value.shape} differ in "
            "another axis than the last"
        )


def check_written(cache: KVCache, count: int) -> None:
    """Raises ValueError if a cache holds fewer positions, as far as is known."""
    index = cache.index
    if not isinstance(index, jax.core.Tracer) and np.any(index < count):
        raise ValueError(
            f"{count} queries attend to a KV cache of which {index} positions are "
            "written: append the positions of the queries first, and cut off padding "
            "(aqtlite.kv_cache.truncate) after attending"
        )


def check_count(cache: KVCache, positions: int) -> None:
    """Raises ValueError for more positions at once than a cache can take."""
    if positions > (most := cache.length - (cache.window or 1) + 1):
        raise ValueError(
            f"{positions} positions at once, and the KV cache of shape "
            f"{cache.key.shape} and window {cache.window} has room for {most}; "
            "initialize it with a longer sequence, or give it fewer positions at once"
        )


def check_room(cache: KVCache, positions: int) -> None:
    """Raises ValueError if a cache has no room for more positions, as far as known."""
    check_count(cache, positions)
    overfull = is_overfull(cache, positions)
    if not isinstance(overfull, jax.core.Tracer) and np.any(overfull):
        raise ValueError(
            f"the KV cache has room for {cache.length} positions, {cache.index} of "
            f"which are written, and was given {positions} more; initialize it with a "
            "longer sequence, or make it longer with aqtlite.kv_cache.grow"
        )


def is_overfull(cache: KVCache, positions: int) -> jax.Array:
    """Whether more positions are too many, of the shape of the index."""
    if cache.window is not None:
        return jnp.zeros_like(cache.index, bool)
    return cache.index + positions > cache.length


def _as_mapped(q: Stored) -> Stored:
    """Drops leading axes that `jax.vmap` maps from the storage order."""
    if isinstance(q, Packed) or q.order is None or len(q.order) <= q.ndim:
        return q
    mapped = len(q.order) - q.ndim
    # Batch axes lead in the order of storage, too.
    order = tuple(axis - mapped for axis in q.order[mapped:])
    return dataclasses.replace(q, order=order)

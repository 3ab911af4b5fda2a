"""New positions of a KV cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config, lowering
from aqtlite.contraction import refused_gradient
from aqtlite.kv_cache import checks, packed, quantizing, slots
from aqtlite.kv_cache.cache import KVCache, Stored, differentiable, slot_axis
from aqtlite.kv_cache.packed import Packed
from aqtlite.qtensor.qtensor import QTensor


def append(
    cache: KVCache, key: jax.Array, value: jax.Array, cfg: config.DotGeneral
) -> KVCache:
    """Writes the next positions; XLA can do so in place if the cache is donated.

    Writing more positions than the cache has room for raises. Where `index` is not
    known, as inside `jax.jit`, only more positions than the length of the cache raise;
    other excess positions overwrite the last ones with NaN scales, which makes all
    later attention to the cache NaN. Where sequences have lengths of their own, it is
    that of the full ones. A cache with a window is never full.

    Args:
        cache: cache to append to.
        key: new keys, ``(*batch, positions, heads, depth)``, floating.
        value: new values, ``(*batch, positions, heads, value depth)``, floating.
        cfg: config that the cache was made with.

    Raises:
        TypeError: if `key` or `value` is not floating.
        ValueError: if a shape does not match, if the cache is on another grid than the
            config's or stored in another dtype than the grid's, or if there is no room.
    """
    order = _order_of(cache.key), _order_of(cache.value)
    cache = checks.checked(cache, cfg)
    checks.check_pair(key, value)
    new_key, new_value = (
        _quantized_as(name, x, past, quantize, cfg)
        for name, x, past, quantize in (
            ("key", key, cache.key, quantizing.quantize_keys),
            ("value", value, cache.value, quantizing.quantize_values),
        )
    )
    positions = key.shape[-3]
    checks.check_room(cache, positions)
    place = _place(cache, positions)
    overfull = jnp.expand_dims(checks.is_overfull(cache, positions), (-3, -2, -1))

    arrays = jax.tree.leaves((cache, cache.floats, key, value))
    past_floats: Any = (None, None)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        past_floats = differentiable(cache)

    def written(
        past: Stored, x: jax.Array, new: QTensor, floats: QTensor | None, order: Any
    ) -> tuple[Stored, Any]:
        scale = jnp.where(overfull, jnp.float32(jnp.nan), new.scale)
        new = dataclasses.replace(new, scale=refused_gradient.marked(scale, x))
        updated = _with_positions(past, new.stop_gradient(), place)
        if isinstance(updated, QTensor):
            updated = dataclasses.replace(updated, order=order)
        if floats is None:
            return updated, None
        moved = new.stored_in(floats.order or tuple(range(new.ndim))).unrounded
        return updated, place(floats.unrounded, moved, slot_axis(floats))

    (keys, of_keys), (values, of_values) = (
        written(*one)
        for one in (
            (cache.key, key, new_key, past_floats[0], order[0]),
            (cache.value, value, new_value, past_floats[1], order[1]),
        )
    )
    return dataclasses.replace(
        cache,
        key=keys,
        value=values,
        index=cache.index + positions,
        floats=None if of_keys is None else (of_keys, of_values),
    )


def _place(cache: KVCache, positions: int) -> Callable[..., jax.Array]:
    """A function that writes new positions to an array: of it, them, and the axis."""
    index, length = cache.index, cache.length
    if index.ndim == 0 and (cache.window is None or positions == 1):
        start = index if cache.window is None else index % length

        def at_one_start(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            starts = [jnp.zeros((), index.dtype)] * x.ndim
            starts[axis] = start
            return lowering.update_slice(x, new, starts)

        return at_one_start
    if cache.window is None:
        first = jnp.minimum(index, length - positions)
        where = slots.following(first, positions)
    else:
        where = slots.following(index, positions) % length
    return functools.partial(slots.written, slots=where)


def _with_positions(
    past: Stored, new: QTensor, place: Callable[..., jax.Array]
) -> Stored:
    """Writes new positions to the arrays of keys or values."""
    if isinstance(past, Packed):
        piece: Stored = packed.pack(new)
    else:
        piece = new.stored_in(past.order or tuple(range(past.ndim)))
    arrays, structure = jax.tree.flatten(past)
    # A cache widened by `widen_int4` stays in int8.
    pieces = [
        one.astype(x.dtype)
        for x, one in zip(arrays, jax.tree.leaves(piece), strict=True)
    ]
    axis = slot_axis(past)
    updated = [place(x, one, axis) for x, one in zip(arrays, pieces, strict=True)]
    return jax.tree.unflatten(structure, updated)


def _order_of(x: Stored) -> tuple[int, ...] | None:
    return x.order if isinstance(x, QTensor) else None


def _quantized_as(
    name: str,
    x: jax.Array,
    past: Stored,
    quantize: Callable[[jax.Array, config.DotGeneral], QTensor],
    cfg: config.DotGeneral,
) -> QTensor:
    """Quantizes new keys or values; raises ValueError unless they fit the cache."""
    new = quantize(x, cfg) if x.ndim == past.ndim else None
    if new is None or (*new.shape[:-3], *new.shape[-2:]) != (
        *past.shape[:-3],
        *past.shape[-2:],
    ):
        raise ValueError(
            f"{name} of shape {x.shape} does not fit a KV cache of shape {past.shape}: "
            "all axes but the length (the last but two) are to be equal"
        )
    return new.astype(past.dtype)

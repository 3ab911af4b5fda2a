"""The quantized keys and values of past positions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, lowering
from aqtlite.contraction import refused_gradient
from aqtlite.kv_cache import configs, packed, quantizing, slots
from aqtlite.kv_cache.packed import Packed
from aqtlite.qtensor.qtensor import QTensor

_WIDENED = {np.dtype("int4"): np.dtype("int8"), np.dtype("uint4"): np.dtype("uint8")}
"""Storage dtypes before and after `aqtlite.flax.widen_int4`."""

_LOST = (
    "a gradient was asked with respect to keys and values that were written to a KV "
    "cache before it left a transformation, such as jax.jit, jax.lax.scan or jax.vmap, "
    "or a Flax layer: append and attend in one call that is differentiated, or take "
    "what was written before for constants, with jax.lax.stop_gradient(cache)"
)
"""Message for gradients that a cache has lost; see `KVCache.floats`."""


Stored = QTensor | Packed


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "index"],
    meta_fields=["window"],
    drop_fields=["floats"],
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of past positions; a pytree.

    `jax.vmap` may map its leading batch axes: ``in_axes=KVCache(0, 0, None)``.

    >>> import jax.numpy as jnp
    >>> cfg = config.qat(8)
    >>> cache = empty((2, 16, 4, 8), jnp.float32, cfg)
    >>> cache = append(cache, jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 4, 8)), cfg)
    >>> int(cache.index), cache.key.shape, cache.key.scale.size
    (1, (2, 16, 4, 8), 128)
    """

    key: Stored
    """Keys, ``(*batch, length, heads, depth)``, stored as ``(*batch, heads, depth,
    length)``, the fastest order for their contraction. Groups of channels with scales
    of their own (``fwd.rhs.blocks``) are heads here."""

    value: Stored
    """Values, ``(*batch, length, heads, depth)``, stored as ``(*batch, heads, length,
    depth)``, or as keys are if they are packed."""

    index: jax.Array
    """Number of positions written: an int32 scalar, or ``(*batch,)``, one for each
    sequence (`aqtlite.kv_cache.truncate` makes it so)."""

    floats: tuple[jax.Array, jax.Array] | None = None
    """Float keys and values, stored like the rounded ones: they take the gradient of
    attention. `append` keeps them while it is traced. They are no part of the pytree:
    a cache that leaves a transformation, such as `jax.jit` or `jax.lax.scan`, or a
    Flax layer, has lost them, and gradients of what was written before are refused."""

    window: int | None = None
    """Number of last positions that are attended to. The cache is then a ring, in which
    new positions take the place of the oldest. None: all positions, and no ring."""

    @property
    def length(self) -> int:
        """Number of positions the cache holds."""
        return self.key.shape[-3]


def empty(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    cfg: config.DotGeneral,
    value_depth: int | None = None,
    window: int | None = None,
) -> KVCache:
    """Makes an empty cache.

    Args:
        shape: shape of the keys, ``(*batch, length, heads, depth)``.
        dtype: dtype of keys and values.
        cfg: config; ``fwd.rhs`` quantizes keys and values.
        value_depth: depth of the values. None: the depth of the keys.
        window: number of last positions that are attended to, at most `length`; the
            cache is a ring, and never full. ``length - window + 1`` positions may be
            written at once. None: no window.

    Raises:
        ValueError: if `check_config` rejects the config, the shape has fewer than 3
            axes, or `window` is not from 1 to the length.
    """
    configs.check_config(cfg)
    if len(shape) < 3:
        raise ValueError(
            f"a KV cache has the shape (*batch, length, heads, depth), got {shape}"
        )
    if window is not None and not 1 <= window <= shape[-3]:
        raise ValueError(
            f"window={window} of a KV cache is to be from 1 to its length, "
            f"{shape[-3]}: the ring holds all positions that are attended to"
        )
    batch = len(shape) - 3
    length, heads, depth = range(batch, batch + 3)
    key = quantizing.quantize_keys(jnp.zeros(shape, dtype), cfg).stop_gradient()
    depth_of_value = shape[-1] if value_depth is None else value_depth
    zeros = jnp.zeros((*shape[:-1], depth_of_value), dtype)
    value = quantizing.quantize_values(zeros, cfg).stop_gradient()
    index = jnp.zeros((), jnp.int32)
    if packed.is_packed(cfg.for_serving().fwd.rhs.grid):
        return KVCache(packed.pack(key), packed.pack(value), index, window=window)
    return KVCache(
        key.stored_in((*range(batch), heads, depth, length)),
        value.stored_in((*range(batch), heads, length, depth)),
        index,
        window=window,
    )


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
    cache = checked(cache, cfg)
    new_key, new_value = (
        _quantized_as(name, x, past, quantize, cfg)
        for name, x, past, quantize in (
            ("key", key, cache.key, quantizing.quantize_keys),
            ("value", value, cache.value, quantizing.quantize_values),
        )
    )
    check_pair(key, value)
    positions = key.shape[-3]
    _check_room(cache, positions)
    place = _place(cache, positions)
    is_overfull = jnp.expand_dims(_is_overfull(cache, positions), (-3, -2, -1))

    arrays = jax.tree.leaves((cache, cache.floats, key, value))
    past_floats: Any = (None, None)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        past_floats = differentiable(cache)

    def written(
        past: Stored, x: jax.Array, new: QTensor, floats: QTensor | None, order: Any
    ) -> tuple[Stored, Any]:
        scale = jnp.where(is_overfull, jnp.float32(jnp.nan), new.scale)
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
        _check_floating(name, x)
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


def _check_room(cache: KVCache, positions: int) -> None:
    """Raises ValueError if a cache has no room for more positions, as far as known."""
    check_count(cache, positions)
    is_overfull = _is_overfull(cache, positions)
    if not isinstance(is_overfull, jax.core.Tracer) and np.any(is_overfull):
        raise ValueError(
            f"the KV cache has room for {cache.length} positions, {cache.index} of "
            f"which are written, and was given {positions} more; initialize it with a "
            "longer sequence, or make it longer with aqtlite.kv_cache.grow"
        )


def _is_overfull(cache: KVCache, positions: int) -> jax.Array:
    if cache.window is not None:
        return jnp.zeros_like(cache.index, bool)
    return cache.index + positions > cache.length


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
    return functools.partial(_at_slots, where)


def _at_slots(where: jax.Array, x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    return slots.written(x, new, axis, where)


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


def slot_axis(x: Stored) -> int:
    """The axis of the slots in stored arrays, negative."""
    return -1 if isinstance(x, Packed) else x.stored_axes[-3] - x.ndim


def _order_of(x: Stored) -> tuple[int, ...] | None:
    return x.order if isinstance(x, QTensor) else None


def differentiable(cache: KVCache) -> tuple[QTensor, QTensor]:
    """Keys and values with the float arrays that take their gradient.

    Raises:
        TypeError: if the cache has lost them, and is differentiated.
    """

    def of(stored: Stored, floats: jax.Array | None) -> QTensor:
        q = packed.as_qtensor(stored) if isinstance(stored, Packed) else stored
        if floats is None:
            scale = refused_gradient.refused(q.scale, q.scale, _LOST)
            floats = dataclasses.replace(q, scale=scale).as_stored().dequant()
        scale = jax.lax.stop_gradient(q.scale)
        return dataclasses.replace(q, scale=scale, unrounded=floats)

    key, value = cache.floats or (None, None)
    return of(cache.key, key), of(cache.value, value)


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


def _as_mapped(q: Stored) -> Stored:
    """Drops leading axes that `jax.vmap` maps from the storage order."""
    if isinstance(q, Packed) or q.order is None or len(q.order) <= q.ndim:
        return q
    mapped = len(q.order) - q.ndim
    # Batch axes lead in the order of storage, too.
    order = tuple(axis - mapped for axis in q.order[mapped:])
    return dataclasses.replace(q, order=order)


def _check_floating(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {x.dtype} of shape {x.shape}")


def _quantized_as(
    name: str,
    x: jax.Array,
    past: Stored,
    quantize: Callable[[jax.Array, config.DotGeneral], QTensor],
    cfg: config.DotGeneral,
) -> QTensor:
    """Quantizes new keys or values.

    Raises:
        TypeError: if they are not floating.
        ValueError: if they do not fit the cache.
    """
    _check_floating(name, x)
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

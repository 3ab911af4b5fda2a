"""The sequences of a cache: cut off, taken out, put in, and given more room.

The first axis of a cache is that of its sequences, and every result has an `index` for
each of them. Results are caches, whose gradients with respect to what was written
before are refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import errors
from aqtlite.kv_cache import slots
from aqtlite.kv_cache.cache import KVCache, Stored, slot_axis
from aqtlite.kv_cache.checks import check_index
from aqtlite.numerics import fields


def positions(cache: KVCache) -> jax.Array:
    """The position in each slot of a cache, -1 where none is written.

    After `truncate` and `grow`, a ring has slots whose positions are lost: attention to
    them is NaN.

    Returns:
        int32, ``(length,)`` or ``(*batch, length)``.

    >>> from aqtlite import kv_cache
    >>> cfg = kv_cache.config_for(8)
    >>> cache = kv_cache.empty((4, 2, 8), jnp.float32, cfg, window=3)
    >>> for _ in range(6):
    ...     cache = kv_cache.append(cache, *[jnp.ones((1, 2, 8))] * 2, cfg)
    >>> positions(cache).tolist()
    [4, 5, 2, 3]
    """
    return slots.positions_in(cache.index, cache.length, cache.window)


def truncate(cache: KVCache, lengths: Any) -> KVCache:
    """Shortens sequences: the next positions are written behind those that are left.

    This takes off the padding of prompts that were padded at their ends, takes back
    positions (speculative decoding), and empties sequences (a length of 0).

    >>> from aqtlite import kv_cache
    >>> cfg = kv_cache.config_for(8)
    >>> cache = kv_cache.empty((2, 8, 2, 8), jnp.float32, cfg)
    >>> prompts = jnp.ones((2, 5, 2, 8))  # of 3 and 5 positions
    >>> cache = kv_cache.append(cache, prompts, prompts, cfg)
    >>> cache = truncate(cache, jnp.array([3, 5]))
    >>> kv_cache.append(cache, prompts[:, :1], prompts[:, :1], cfg).index.tolist()
    [4, 6]

    Args:
        cache: the cache.
        lengths: number of positions that each sequence keeps, int32, which broadcasts
            to the batch axes; all of a sequence that has fewer.

    Raises:
        TypeError: if the lengths are not integers.
        ValueError: if their shape does not fit, a length is negative, or a cache with
            a window has lost positions that are attended to then. Where these are not
            known, as inside `jax.jit` or after an earlier cut, a negative length is 0,
            and attention to lost positions is NaN.
    """
    check_index(cache)
    lengths = _as_array("lengths", lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(
            f"lengths must be integers, got {lengths.dtype} of shape {lengths.shape}"
        )
    batch = cache.key.shape[:-3]
    if lengths.ndim > len(batch) or any(
        size not in (1, other)
        for size, other in zip(lengths.shape[::-1], batch[::-1], strict=False)
    ):
        raise ValueError(
            f"lengths of shape {lengths.shape} do not broadcast to the batch axes "
            f"{batch} of a KV cache of shape {cache.key.shape}"
        )
    if _is_known(lengths) and np.any(lengths < 0):
        raise ValueError(f"lengths={lengths} of sequences are not to be negative")
    index = jnp.broadcast_to(cache.index, batch)
    kept = jnp.minimum(index, jnp.maximum(lengths.astype(index.dtype), 0))
    cache = dataclasses.replace(cache, index=kept, floats=None)
    if cache.window is None:
        return cache
    first = jnp.maximum(kept - cache.window + 1, 0)
    is_lost = (kept > 0) & (first < index - cache.length)
    if _is_known(is_lost) and np.any(is_lost):
        raise ValueError(
            f"a KV cache of length {cache.length} with a window of {cache.window} and "
            f"{index} positions has lost those before position {lengths}: truncate "
            f"takes off at most {cache.length - cache.window + 1}, or all"
        )
    before, after = (
        slots.positions_in(one, cache.length, cache.window) for one in (index, kept)
    )
    return _without(cache, (after >= 0) & (after != before))


def _without(cache: KVCache, is_lost: jax.Array) -> KVCache:
    """Has attention to slots give NaN: they hold other positions than those they had.

    Args:
        cache: a cache with a window, without floats.
        is_lost: bool, ``(*batch, length)`` or ``(length,)``.
    """

    def marked(side: Stored) -> Stored:
        lost = _of_slots(is_lost, slot_axis(side))
        return dataclasses.replace(side, scale=jnp.where(lost, jnp.nan, side.scale))

    return dataclasses.replace(cache, key=marked(cache.key), value=marked(cache.value))


def _of_slots(x: jax.Array, axis: int) -> jax.Array:
    """Gives an array of slots the rank of a stored array, whose slots are on an axis.

    Args:
        x: ``(*batch, length)`` or ``(length,)``.
        axis: axis of the slots, negative.
    """
    return jnp.expand_dims(x, tuple(i for i in (-3, -2, -1) if i != axis))


def take(cache: KVCache, rows: Any) -> KVCache:
    """The sequences at some rows of the first batch axis, in their order.

    Args:
        cache: a cache with a batch axis.
        rows: indices, int, ``(count,)``; they may repeat (the prompt of several
            samples, or the beams that go on).

    Raises:
        TypeError: if `rows` are not integers.
        ValueError: if they have another rank, or the cache has no batch axis.
        IndexError: if a row is out of range and known; others are clipped.
    """
    rows = _as_array("rows", rows)
    if rows.ndim == 1 and not rows.size:
        rows = rows.astype(jnp.int32)
    _check_indices("rows", rows, 1)
    _check_rows(cache, rows, cache.key.shape[0])
    return _mapped(lambda x: jnp.take(x, rows, axis=0, mode="clip"), cache)


def insert(cache: KVCache, row: Any, other: KVCache) -> KVCache:
    """Replaces the sequences from a row on by those of another cache.

    So a sequence that is finished makes room for the next, whose prompt was read into
    a cache of its own.

    Args:
        cache: a cache with a batch axis.
        row: the first row, int, which may be traced; the sequences then go to the last
            rows if there are fewer behind it.
        other: a cache of the same config, no longer than `cache`, and of the same
            length if they have windows.

    Raises:
        TypeError: if `row` is not an integer, or `other` no cache.
        ValueError: if the caches do not fit, or have no batch axis.
        IndexError: if there are fewer rows, and `row` is known.
    """
    row = _as_array("row", row)
    _check_indices("row", row, 0)
    if not isinstance(other, KVCache):
        raise TypeError(f"insert takes a KVCache behind row, got {errors.brief(other)}")
    _check_rows(cache, row + np.arange(other.key.shape[0]), cache.key.shape[0])
    if other.length < cache.length:
        other = grow(other, cache.length)
    _check_alike("insert", cache, other)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), row, 0)

    return _mapped(put, cache, other)


def concatenate(caches: Sequence[KVCache]) -> KVCache:
    """Joins the sequences of caches of one config and length.

    Raises:
        ValueError: if there are none, or they do not fit; `grow` makes lengths equal.
    """
    if not caches:
        raise ValueError("concatenate takes at least one KV cache")
    for other in caches[1:]:
        _check_alike("concatenate", caches[0], other)
    _check_rows(caches[0], np.zeros(0, int), 0)
    return _mapped(lambda *xs: jnp.concatenate(xs, 0), *caches)


def grow(cache: KVCache, length: int) -> KVCache:
    """Copies a cache to one with room for more positions.

    >>> from aqtlite import kv_cache
    >>> cache = kv_cache.empty((2, 8, 4, 8), jnp.float32, kv_cache.config_for(8))
    >>> grow(cache, 16).key.shape
    (2, 16, 4, 8)

    Raises:
        TypeError: if `length` is no int.
        ValueError: if the cache is longer than `length`.
    """
    at_least = fields.integer(cache.length, hint=": a KV cache does not shrink")
    length = at_least(length, "length of a KV cache")
    more = length - cache.length
    if cache.window is None:
        return _resized(cache, lambda x, axis: _padded(x, axis, more))
    # Position p is in slot p mod length.
    held = slots.positions_in(cache.index, length, cache.window)
    source = held % cache.length

    def moved(x: jax.Array, axis: int) -> jax.Array:
        if source.ndim == 1:
            return jnp.take(x, source, axis=axis)
        return jnp.take_along_axis(x, _of_slots(source, axis), axis=axis)

    is_lost = (held >= 0) & (held < cache.index[..., None] - cache.length)
    return _without(_resized(cache, moved), is_lost)


def _padded(x: jax.Array, axis: int, more: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths)


def _resized(cache: KVCache, change: Callable[[jax.Array, int], jax.Array]) -> KVCache:
    def resized(side: Stored) -> Stored:
        axis = slot_axis(side)
        return jax.tree.map(lambda x: change(x, axis), side)

    return dataclasses.replace(
        cache, key=resized(cache.key), value=resized(cache.value), floats=None
    )


def _mapped(change: Callable[..., jax.Array], *caches: KVCache) -> KVCache:
    """Changes all arrays, whose first axis is that of the sequences."""
    for one in caches:
        check_index(one)
    given = [
        dataclasses.replace(
            one, index=jnp.broadcast_to(one.index, one.key.shape[:-3]), floats=None
        )
        for one in caches
    ]
    return jax.tree.map(change, *given)


def _as_array(name: str, x: Any) -> jax.Array:
    """Makes an array of integers; raises TypeError for what is none, as a cache."""
    try:
        return jnp.asarray(x)
    except TypeError:
        # JAX's error has all elements of a cache.
        raise TypeError(f"{name} must be of integers, got {errors.brief(x)}") from None


def _check_indices(name: str, x: jax.Array, ndim: int) -> None:
    """Raises TypeError or ValueError unless an array is of integers, of a rank."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be of integers, got {x.dtype}")
    if x.ndim != ndim:
        wanted = "a scalar" if ndim == 0 else f"of {ndim} axis"
        raise ValueError(f"{name} must be {wanted}, got the shape {x.shape}")


def _check_rows(cache: KVCache, rows: Any, count: int) -> None:
    if cache.key.ndim < 4:
        raise ValueError(
            f"a KV cache of shape {cache.key.shape} has no batch axis; make it with "
            "one, (batch, length, heads, depth)"
        )
    if _is_known(rows) and np.any((rows < 0) | (rows >= count)):
        raise IndexError(f"rows {rows} of a KV cache of {count} sequences")


def _check_alike(what: str, one: KVCache, other: KVCache) -> None:
    def of(cache: KVCache) -> Any:
        key, value = cache.key, cache.value
        kinds = type(key), key.numerics, key.dtype, key.rotation, cache.window
        return kinds, key.shape[1:], value.shape[1:]

    if of(one) != of(other):
        raise ValueError(
            f"{what}: KV caches of shapes {one.key.shape} and {other.key.shape}, of "
            f"{one.key.numerics} and {other.key.numerics}, for {one.key.dtype} and "
            f"{other.key.dtype}, with windows {one.window} and {other.window}, do not "
            "fit: all but their sequences are to be equal"
        )


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)

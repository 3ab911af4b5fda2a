"""The slots of a cache: where positions are written, and which of them are seen.

A cache without a window has position p in slot p. With one, it is a ring of `length`
slots, and has position p in slot ``p mod length``, until a later one takes its place.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from aqtlite.shapes.sharding import explicit_sharding, sharded_like, spec_of_axes


def positions_in(index: jax.Array, length: int, window: int | None) -> jax.Array:
    """The position in each slot, int32; -1 where none is written.

    Args:
        index: number of positions written, int32 of any shape.
        length: number of slots.
        window: window of the attention; None for none.

    Returns:
        ``(*index.shape, length)``.
    """
    slots = _along_last(jnp.arange(length, dtype=jnp.int32), index.ndim + 1)
    index = index[..., None]
    if window is None:
        return jnp.where(slots < index, slots, -1)
    last = index - 1
    return jnp.maximum(last - (last - slots) % length, -1)


def seen(index: jax.Array, count: int, length: int, window: int | None) -> jax.Array:
    """Which slots the last positions attend to: ``(*index.shape, count, length)``.

    Args:
        index: as in `positions_in`.
        count: number of last positions.
        length: number of slots.
        window: as in `positions_in`.
    """
    queries = following(index - count, count)[..., None]
    if window is None:
        return _along_last(jnp.arange(length), queries.ndim) <= queries
    held = positions_in(index, length, window)[..., None, :]
    return (held >= 0) & (held <= queries) & (held > queries - window)


def following(index: jax.Array, count: int) -> jax.Array:
    """The positions from `index` on: ``(*index.shape, count)``."""
    return index[..., None] + _along_last(jnp.arange(count), index.ndim + 1)


def _along_last(x: jax.Array, ndim: int) -> jax.Array:
    """Gives a vector axes of size 1, for users who forbid JAX to promote ranks."""
    return jnp.expand_dims(x, range(ndim - 1))


def written(x: jax.Array, new: jax.Array, axis: int, slots: jax.Array) -> jax.Array:
    """Writes new positions to their slots.

    Args:
        x: array of a cache.
        new: array of the new positions.
        axis: axis of the slots, negative.
        slots: slot of each new position, ``(*batch, positions)`` or ``(positions,)``.
    """
    after = (slice(None),) * (-axis - 1)
    layout = explicit_sharding(x)
    if layout is not None:
        batch = spec_of_axes(layout, x.ndim)[: slots.ndim - 1]
        slots = sharded_like(slots, layout.update(spec=PartitionSpec(*batch)))

    def one(x: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        at = x.at[(..., slots, *after)]
        return at.set(new, unique_indices=True, mode="promise_in_bounds")

    for _ in range(slots.ndim - 1):
        one = jax.vmap(one)
    return one(x, new, slots)

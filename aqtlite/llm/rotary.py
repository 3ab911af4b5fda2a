"""Rotary position embedding of queries and keys."""

import jax
import jax.numpy as jnp

from aqtlite.llm.config import Rope


def rotated(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotates pairs of channels by angles proportional to the position.

    Args:
        x: queries or keys, ``(*batch, positions, heads, channels)``.
        positions: int32, ``(positions,)``.
        rope: base, factors and layout.

    Returns:
        An array like `x`, computed in float32.
    """
    frequencies = jnp.asarray(rope.frequencies(x.shape[-1]))
    turn = turned_neighbors if rope.interleaved else turned_halves
    return turn(x, positions[:, None] * frequencies)


def turned_halves(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates channel i with channel i + size/2.

    Args:
        x: ``(*batch, positions, heads, channels)``.
        angles: ``(positions, channels / 2)``.
    """
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)


def turned_neighbors(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates pairs of adjacent channels; arguments are those of `turned_halves`."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    wide = x.astype(jnp.float32)
    a, b = wide[..., ::2], wide[..., 1::2]
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return pairs.reshape(x.shape).astype(x.dtype)

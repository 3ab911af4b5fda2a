"""A KV cache in floats, with the face of `aqtlite.flax.nnx.QuantizedCache`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite.kv_cache import slots


class _Floats(NamedTuple):
    """Keys and values, ``(*batch, length, heads, depth)``, and how many are written."""

    key: jax.Array
    value: jax.Array
    written: jax.Array


class FloatCache(nnx.Module):
    """Causal attention with a cache of float keys and values.

    Before `init_cache` it attends to the positions of the call. More positions than the
    cache has room for make all attention NaN, as in a quantized one.

    Args:
        window: number of last positions that are attended to; None for all.
    """

    def __init__(self, *, window: int | None = None):
        self.window = window
        self.cache: nnx.Cache | None = nnx.data(None)

    def init_cache(
        self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
    ) -> None:
        """Makes an empty cache of keys ``(*batch, length, heads, depth)``."""
        zeros = jnp.zeros(shape, dtype)
        self.cache = nnx.Cache(_Floats(zeros, zeros, jnp.zeros((), jnp.int32)))

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **of_flax: Any
    ) -> jax.Array:
        """Attends; arguments and result are those of `QuantizedCache`."""
        del of_flax
        count = query.shape[-3]
        index = jnp.int32(count)
        if self.cache is not None:
            past = self.cache.get_value()
            write = functools.partial(_written, index=past.written)
            index = past.written + count
            key, value = write(past.key, key), write(past.value, value)
            self.cache.set_value(_Floats(key, value, index))
        seen = slots.seen(index, count, key.shape[-3], None)
        if self.window is not None:
            last = index - count + jnp.arange(count)[:, None]
            seen &= jnp.arange(key.shape[-3]) > last - self.window
        return attend(query, key, value, seen)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array
) -> jax.Array:
    """Dot-product attention of floats.

    Those of float16 are attended to in float32: XLA has no products of float16 with
    sums in float32 on CPUs, which `jax.nn.dot_product_attention` asks for.

    Args:
        query: ``(*batch, positions, query heads, depth)``.
        key: ``(*batch, length, heads, depth)``.
        value: like `key`.
        seen: bool, ``(positions, length)``: which positions are attended to.
    """
    dtype = query.dtype
    if dtype == jnp.float16:
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    out = jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])
    return out.astype(dtype)


def _written(past: jax.Array, new: jax.Array, *, index: jax.Array) -> jax.Array:
    is_overfull = index + new.shape[-3] > past.shape[-3]
    new = jnp.where(is_overfull, jnp.nan, new).astype(past.dtype)
    return jax.lax.dynamic_update_slice_in_dim(past, new, index, past.ndim - 3)

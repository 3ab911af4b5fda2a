"""The quantized keys and values of past positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.contraction import refused_gradient
from aqtlite.kv_cache import configs, packed, quantizing
from aqtlite.kv_cache.packed import Packed
from aqtlite.numerics import fields
from aqtlite.qtensor.qtensor import QTensor

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
    >>> from aqtlite import kv_cache
    >>> cfg = config.qat(8)
    >>> cache = kv_cache.empty((2, 16, 4, 8), jnp.float32, cfg)
    >>> new = jnp.ones((2, 1, 4, 8))
    >>> cache = kv_cache.append(cache, key=new, value=new, cfg=cfg)
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
        TypeError: if `dtype` is not floating, or `window` no int.
        ValueError: if `check_config` rejects the config, the shape has fewer than 3
            axes, or `window` is not from 1 to the length.
    """
    configs.check_config(cfg)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"dtype={np.dtype(dtype)} of a KV cache: it is that of keys and values "
            "before they are quantized, a floating one; fwd.rhs of the config says in "
            "what they are stored"
        )
    if len(shape) < 3:
        raise ValueError(
            f"a KV cache has the shape (*batch, length, heads, depth), got {shape}"
        )
    if window is not None:
        held = fields.integer(
            1, shape[-3], ", and its length is the most that the ring holds"
        )
        window = held(window, "window of a KV cache")
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


def slot_axis(x: Stored) -> int:
    """The axis of the slots in stored arrays, negative."""
    return -1 if isinstance(x, Packed) else x.stored_axes[-3] - x.ndim


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

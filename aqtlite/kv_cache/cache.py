"""The quantized keys and values of past positions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.contraction import refused_gradient, straight_through
from aqtlite.operations import OperandAxes
from aqtlite.qtensor import shape_operations
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "index"],
    meta_fields=[],
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

    key: QTensor
    """Keys, ``(*batch, length, heads, depth)``, stored as ``(*batch, heads, depth,
    length)``, the fastest order for their contraction."""

    value: QTensor
    """Values, ``(*batch, length, heads, depth)``, stored as ``(*batch, heads, length,
    depth)``."""

    index: jax.Array
    """Number of positions written, int32 scalar."""

    floats: tuple[jax.Array, jax.Array] | None = None
    """Float keys and values, stored like the rounded ones: they take the gradient of
    attention. `append` keeps them while it is traced. They are no part of the pytree:
    a cache that leaves a transformation, such as `jax.jit` or `jax.lax.scan`, or a
    Flax layer, has lost them, and gradients of what was written before are refused."""

    @property
    def length(self) -> int:
        """Number of positions the cache holds."""
        return self.key.shape[-3]


def check_config(cfg: config.DotGeneral) -> None:
    """Raises ValueError unless a cache can be quantized by ``cfg.fwd.rhs``.

    Args:
        cfg: config of both contractions, in which queries and probabilities are lhs.
    """
    tensor = cfg.fwd.rhs
    if not tensor.is_quantized or tensor.use_fake_quant:
        raise ValueError(
            "fwd.rhs is what keys and values are quantized by, and "
            f"{tensor!r} leaves them in float; give it numerics, as "
            "config.qat(8) and config.weight_only(8) do"
        )
    if tensor.blocks is not None or tensor.calib_shared_axes is not None:
        raise ValueError(
            "a KV cache has one scale for each position and head; leave "
            f"fwd.rhs.blocks={tensor.blocks!r} and "
            f"fwd.rhs.calib_shared_axes={tensor.calib_shared_axes!r} None"
        )
    for side, one in (("lhs", cfg.fwd.lhs), ("rhs", tensor)):
        if one.calibration.has_state or one.calibration.is_learned:
            raise ValueError(
                f"fwd.{side}.calibration={one.calibration!r} needs statistics or "
                "parameters, which a KV cache does not keep; take one that looks at "
                "the array alone, such as calibration.AbsMax()"
            )
    if cfg.out.is_quantized:
        raise ValueError(
            f"out={cfg.out!r} would quantize the scores of attention; leave it float"
        )
    if cfg.fwd.smoothing is not None:
        raise ValueError(
            f"fwd.smoothing={cfg.fwd.smoothing!r} moves scales between keys and "
            "queries, of which a KV cache has the past keys in integers; leave it None"
        )
    if tensor.sparsity is not None:
        raise ValueError(
            f"fwd.rhs.sparsity={tensor.sparsity!r} prunes weights, and would prune "
            "keys and values; leave it None"
        )
    if cfg.fwd.rotation is not None:
        raise ValueError(
            f"fwd.rotation={cfg.fwd.rotation!r} rotates queries and keys, which a KV "
            "cache quantizes as they are; leave it None"
        )


def empty(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    cfg: config.DotGeneral,
    value_depth: int | None = None,
) -> KVCache:
    """Makes an empty cache.

    Args:
        shape: shape of the keys, ``(*batch, length, heads, depth)``.
        dtype: dtype of keys and values.
        cfg: config; ``fwd.rhs`` quantizes keys and values.
        value_depth: depth of the values. None: the depth of the keys.

    Raises:
        ValueError: if `check_config` rejects the config, or the shape has fewer than 3
            axes.
    """
    check_config(cfg)
    if len(shape) < 3:
        raise ValueError(
            f"a KV cache has the shape (*batch, length, heads, depth), got {shape}"
        )
    batch = len(shape) - 3
    length, heads, depth = range(batch, batch + 3)
    key = quantize_keys(jnp.zeros(shape, dtype), cfg)
    zeros = jnp.zeros((*shape[:-1], value_depth or shape[-1]), dtype)
    value = quantize_values(zeros, cfg)
    return KVCache(
        key.stop_gradient().stored_in((*range(batch), heads, depth, length)),
        value.stop_gradient().stored_in((*range(batch), heads, length, depth)),
        jnp.zeros((), jnp.int32),
    )


def append(
    cache: KVCache, key: jax.Array, value: jax.Array, cfg: config.DotGeneral
) -> KVCache:
    """Writes the next positions; XLA can do so in place if the cache is donated.

    Writing more positions than the cache has room for raises. Where `index` is not
    known, as inside `jax.jit`, only more positions than the length of the cache raise;
    other excess positions overwrite the last ones with NaN scales, which makes all
    later attention to the cache NaN.

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
    order = cache.key.order, cache.value.order
    cache = checked(cache, cfg)
    _check_new("key", key, cache.key)
    _check_new("value", value, cache.value)
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key of shape {key.shape} and value of shape {value.shape} differ in "
            "another axis than the last"
        )
    positions, index = key.shape[-3], cache.index
    if positions > cache.length:
        raise ValueError(
            f"key of shape {key.shape} has {positions} positions, and the KV cache of "
            f"shape {cache.key.shape} has room for {cache.length}; initialize it with "
            "a longer sequence, or give it fewer positions at once"
        )
    is_overfull = index + positions > cache.length
    if not isinstance(is_overfull, jax.core.Tracer) and np.any(is_overfull):
        raise ValueError(
            f"the KV cache has room for {cache.length} positions, {index} of which are "
            f"written, and was given {positions} more; initialize it with a longer "
            "sequence"
        )

    def written(past: QTensor, x: jax.Array, new: QTensor, order: Any) -> QTensor:
        new = new.astype(past.dtype)
        scale = jnp.where(is_overfull, jnp.float32(jnp.nan), new.scale)
        starts = [0] * (past.ndim - 3) + [index, 0, 0]
        starts = [jnp.asarray(start, index.dtype) for start in starts]
        # A cache widened by `widen_int4` stays in int8.
        qvalue = new.qvalue.astype(past.qvalue.dtype)
        new = dataclasses.replace(
            new, qvalue=qvalue, scale=refused_gradient.marked(scale, x)
        )
        if past.unrounded is None:
            new = new.stop_gradient()
        updated = shape_operations.dynamic_update_slice(past, new, starts)
        return dataclasses.replace(updated, order=order)

    arrays = jax.tree.leaves((cache, cache.floats, key, value))
    past = cache.key, cache.value
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        past = differentiable(cache)
    keys = written(past[0], key, quantize_keys(key, cfg), order[0])
    values = written(past[1], value, quantize_values(value, cfg), order[1])
    floats = keys.unrounded, values.unrounded
    return KVCache(
        keys.stop_gradient(),
        values.stop_gradient(),
        index + positions,
        None if keys.unrounded is None else floats,
    )


def quantize_keys(x: jax.Array, cfg: config.DotGeneral) -> QTensor:
    """Quantizes keys with one scale per position and head."""
    axes = OperandAxes.of_contracting(x.ndim, (x.ndim - 1,))
    return straight_through.quantized(x, cfg.for_serving().fwd.rhs, axes, "fwd.rhs")


def quantize_values(x: jax.Array, cfg: config.DotGeneral) -> QTensor:
    """Quantizes values as attention in training does (`config.for_values`)."""
    tensor = cfg.for_serving().fwd.rhs
    tensor = dataclasses.replace(tensor, calib_shared_axes="remaining")
    *batch, length, heads, depth = range(x.ndim)
    axes = OperandAxes((length,), (*batch, heads), (depth,))
    return straight_through.quantized(x, tensor, axes, "fwd.rhs")


def differentiable(cache: KVCache) -> tuple[QTensor, QTensor]:
    """Keys and values with the float arrays that take their gradient.

    Raises:
        TypeError: if the cache has lost them, and is differentiated.
    """

    def of(q: QTensor, floats: jax.Array | None) -> QTensor:
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
        ValueError: if the cache is on another grid than the config's, or stored in
            another dtype.
    """
    cache = dataclasses.replace(
        cache, key=_as_mapped(cache.key), value=_as_mapped(cache.value)
    )
    grid = cfg.for_serving().fwd.rhs.grid
    for name, past in (("keys", cache.key), ("values", cache.value)):
        if past.numerics not in (None, grid):
            changes = "; ".join(config.differences(past.numerics, grid))
            raise ValueError(
                f"a KV cache of shape {past.shape} has {name} of {past.qvalue.dtype} "
                f"on another grid than fwd.rhs.numerics of the config: {changes}; give "
                "the config that the cache was made with"
            )
        stored, wanted = past.qvalue.dtype, grid.storage_dtype
        if stored not in (wanted, _WIDENED.get(wanted)):
            raise ValueError(
                f"a KV cache of shape {past.shape} has {name} stored in {stored}, and "
                f"{grid!r} of fwd.rhs of the config is stored in {wanted}; give the "
                "config that the cache was made with"
            )
    return cache


def _as_mapped(q: QTensor) -> QTensor:
    """Drops leading axes that `jax.vmap` maps from the storage order."""
    if q.order is None or len(q.order) <= q.ndim:
        return q
    mapped = len(q.order) - q.ndim
    # Batch axes lead in the order of storage, too.
    order = tuple(axis - mapped for axis in q.order[mapped:])
    return dataclasses.replace(q, order=order)


def _check_new(name: str, x: jax.Array, past: QTensor) -> None:
    """Raises TypeError or ValueError unless x is floating and fits the cache."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {x.dtype} of shape {x.shape}")
    if x.ndim != past.ndim or (*x.shape[:-3], *x.shape[-2:]) != (
        *past.shape[:-3],
        *past.shape[-2:],
    ):
        raise ValueError(
            f"{name} of shape {x.shape} does not fit a KV cache of shape {past.shape}: "
            "all axes but the length (the last but two) are to be equal"
        )

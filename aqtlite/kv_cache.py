"""A quantized KV cache, and attention to it.

Keys and values have one scale per position and head. Attention contracts the stored
integers:

- scores: ``sum_d q_d (s k_d) = s sum_d q_d k_d``: the scale of a key multiplies its
  score;
- values: ``sum_t p_t (s_t v_t) = sum_t (p_t s_t) v_t``: the scale of a value multiplies
  its probability before the probability is quantized
  (`aqtlite.contraction.scale_moves`).

`aqtlite.flax.QuantizedCache` puts the cache into Flax layers.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.contraction.einsum import einsum
from aqtlite.operations import OperandAxes
from aqtlite.qtensor import shape_operations
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import quantizer
from aqtlite.quantization.quantize import quantize

_WIDENED = {np.dtype("int4"): np.dtype("int8"), np.dtype("uint4"): np.dtype("uint8")}
"""Storage dtypes before and after `aqtlite.flax.widen_int4`."""


@jax.tree_util.register_dataclass
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
    >>> attend(jnp.ones((2, 1, 4, 8)), cache, cfg).shape
    (2, 1, 4, 8)
    """

    key: QTensor
    """Keys, ``(*batch, length, heads, depth)``, stored as ``(*batch, heads, depth,
    length)``, the fastest order for their contraction."""

    value: QTensor
    """Values, ``(*batch, length, heads, depth)``, stored as ``(*batch, heads, length,
    depth)``."""

    index: jax.Array
    """Number of positions written, int32 scalar."""

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
    key = _quantize_keys(jnp.zeros(shape, dtype), cfg)
    zeros = jnp.zeros((*shape[:-1], value_depth or shape[-1]), dtype)
    value = _quantize_values(zeros, cfg)
    return KVCache(
        key.stored_in((*range(batch), heads, depth, length)),
        value.stored_in((*range(batch), heads, length, depth)),
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
    cache = _checked(cache, cfg)
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

    def written(past: QTensor, new: QTensor, order: Any) -> QTensor:
        new = new.astype(past.dtype)
        scale = jnp.where(is_overfull, jnp.float32(jnp.nan), new.scale)
        starts = [0] * (past.ndim - 3) + [index, 0, 0]
        starts = [jnp.asarray(start, index.dtype) for start in starts]
        # A cache widened by `widen_int4` stays in int8.
        qvalue = new.qvalue.astype(past.qvalue.dtype)
        new = dataclasses.replace(new, qvalue=qvalue, scale=scale)
        updated = shape_operations.dynamic_update_slice(past, new, starts)
        return dataclasses.replace(updated, order=order)

    return KVCache(
        written(cache.key, _quantize_keys(key, cfg), order[0]),
        written(cache.value, _quantize_values(value, cfg), order[1]),
        index + positions,
    )


def attend(
    query: jax.Array,
    cache: KVCache,
    cfg: config.DotGeneral,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Causal dot-product attention of the last positions to all positions written.

    With fewer key heads than query heads (grouped-query attention), each key head
    serves a group of consecutive query heads.

    Args:
        query: queries of the positions written last, ``(*batch, positions, query heads,
            depth)``; each position attends to itself and to all earlier ones.
        cache: cache that already holds the keys and values of these positions.
        cfg: config that the cache was made with.
        mask: True where attended; broadcasts to ``(*batch, query heads, positions,
            length)``.

    Returns:
        ``(*batch, positions, query heads, value depth)``, in the dtype of `query`.
    """
    cache = _checked(cache, cfg)
    positions = cache.index - query.shape[-3] + jnp.arange(query.shape[-3])
    causal = jnp.arange(cache.length) <= positions[:, None]
    masks = (causal,) if mask is None else (mask, causal)
    return _attend(query, cache.key, cache.value, cfg, masks)


def attend_uncached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cfg: config.DotGeneral,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Dot-product attention to keys and values quantized as in a cache.

    Args:
        query: queries, ``(*batch, positions, query heads, depth)``.
        key: keys, ``(*batch, length, heads, depth)``.
        value: values, ``(*batch, length, heads, value depth)``.
        cfg: config of the cache.
        mask: as for `attend`; without one, every position attends to all.
    """
    masks = () if mask is None else (mask,)
    keys, values = _quantize_keys(key, cfg), _quantize_values(value, cfg)
    return _attend(query, keys, values, cfg, masks)


def _attend(
    query: jax.Array,
    key: QTensor,
    value: QTensor,
    cfg: config.DotGeneral,
    masks: tuple[jax.Array, ...],
) -> jax.Array:
    *batch, count, query_heads, depth = query.shape
    heads = key.shape[-2]
    if (*batch, depth) != (*key.shape[:-3], key.shape[-1]) or query_heads % heads:
        raise ValueError(
            f"query of shape {query.shape} does not fit keys of shape {key.shape}: "
            "batch axes and depth are to be equal, and the heads of the query a "
            "multiple of those of the keys"
        )
    cfg = cfg.for_serving()
    group = query_heads // heads
    query = query / jnp.sqrt(depth).astype(query.dtype)
    grouped = query.reshape(*batch, count, heads, group, depth)
    scores: Any = einsum(
        "...qhgd,...khd->...hgqk",
        grouped,
        key,
        cfg=cfg,
        preferred_element_type=jnp.float32,
    )
    for mask in masks:
        mask = _by_group(mask, heads, group, (count, key.shape[-3]))
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    out: Any = einsum(
        "...hgqk,...khd->...qhgd",
        jax.nn.softmax(scores),
        value,
        cfg=cfg,
        preferred_element_type=query.dtype,
    )
    out = out.reshape(*batch, count, query_heads, value.shape[-1])
    return cast(jax.Array, out)


def _by_group(
    mask: jax.Array, heads: int, group: int, last: tuple[int, int]
) -> jax.Array:
    """Splits a mask's axis of query heads, if present, into key heads and groups."""
    mask = jnp.atleast_2d(mask)
    rows, columns = mask.shape[-2:]
    if rows not in (1, last[0]) or columns not in (1, last[1]):
        raise ValueError(
            f"mask of shape {mask.shape} does not broadcast to {last[0]} queries and "
            f"{last[1]} keys, its last two axes; the keys are all the positions that "
            "the cache has room for"
        )
    if mask.ndim == 2:
        return mask
    *batch, own, _, _ = mask.shape
    if own not in (1, heads * group):
        raise ValueError(
            f"mask of shape {mask.shape} does not broadcast to {heads * group} heads"
        )
    split = (1, 1) if own == 1 else (heads, group)
    return mask.reshape(*batch, *split, rows, columns)


def _quantize_keys(x: jax.Array, cfg: config.DotGeneral) -> QTensor:
    """Quantizes keys with one scale per position and head."""
    return quantize(x, cfg.for_serving().fwd.rhs, axes=-1).stop_gradient()


def _quantize_values(x: jax.Array, cfg: config.DotGeneral) -> QTensor:
    """Quantizes values as attention in training does (`config.for_values`)."""
    tensor = cfg.for_serving().fwd.rhs
    tensor = dataclasses.replace(tensor, calib_shared_axes="remaining")
    *batch, length, heads, depth = range(x.ndim)
    axes = OperandAxes((length,), (*batch, heads), (depth,))
    return quantizer.quantize_array(x, tensor, axes, "fwd.rhs").stop_gradient()


def _checked(cache: KVCache, cfg: config.DotGeneral) -> KVCache:
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

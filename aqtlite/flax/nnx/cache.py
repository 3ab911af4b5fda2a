"""A quantized KV cache for NNX's attention layers."""

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite import config, kv_cache
from aqtlite.kv_cache import attention, slots

# What layers of NNX give to a function of attention.
_OF_NNX = frozenset(inspect.signature(nnx.dot_product_attention).parameters)


class QuantizedCache(nnx.Module):
    """Attention with a quantized cache of keys and values, for decoding.

    Pass one to each layer as `attention_fn=` of `nnx.MultiHeadAttention`, instead of
    ``decode=True``. Before `init_cache` it attends to keys and values quantized as in a
    cache: so one model trains and decodes. After it, each call writes its positions to
    the cache, and attends to all positions written.

    >>> from flax import nnx
    >>> layer = nnx.MultiHeadAttention(
    ...     2, 8, attention_fn=QuantizedCache(), decode=False, rngs=nnx.Rngs(0)
    ... )
    >>> layer.attention_fn.init_cache((1, 16, 2, 4))
    >>> cache = layer.attention_fn
    >>> layer(jnp.ones((1, 3, 8))).shape, int(cache.cache.get_value().index)
    ((1, 3, 8), 3)

    Args:
        cfg: config of the contractions of queries with keys, and probabilities with
            values; None for ``kv_cache.config_for(8)``.
        window: number of last positions that are attended to; None for all. Before
            `init_cache` it takes part if the layer is causal (``is_causal``); otherwise
            give the mask of the window.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral`.
        ValueError: if `cfg` cannot quantize a cache.
    """

    def __init__(
        self, cfg: config.DotGeneral | None = None, *, window: int | None = None
    ):
        cfg = kv_cache.config_for(8) if cfg is None else cfg
        kv_cache.check_config(cfg)
        self.cfg = cfg
        self.window = window
        self.cache: nnx.Cache | None = nnx.data(None)

    def init_cache(
        self,
        shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike = jnp.float32,
        value_depth: int | None = None,
    ) -> None:
        """Makes an empty cache; the arguments are those of `kv_cache.empty`."""
        made = kv_cache.empty(shape, dtype, self.cfg, value_depth, self.window)
        self.cache = nnx.Cache(made)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        is_causal: bool = False,
        **of_flax: Any,
    ) -> jax.Array:
        """Attends to the positions of the call, or to all in the cache.

        Args:
            query: ``(*batch, positions, query heads, depth)``.
            key: ``(*batch, positions, heads, depth)``.
            value: ``(*batch, positions, heads, value depth)``.
            mask: True where attended; with a cache, a column for each of its slots.
            dropout_rate: dropout rate of attention; must be 0 unless `deterministic`.
            deterministic: whether dropout is off.
            is_causal: whether positions attend to earlier ones alone, without a cache.
            **of_flax: other arguments of `nnx.dot_product_attention`, which have no
                effect. A bias of the scores must be None.

        Raises:
            TypeError: if there is no such argument.
            ValueError: if the cache is full or of another shape, or a bias or dropout
                is given.
        """
        if unknown := of_flax.keys() - _OF_NNX:
            raise TypeError(f"QuantizedCache has no argument {min(unknown)!r}")
        if of_flax.get("bias") is not None:
            raise ValueError(
                "bias= was given to attention to a KV cache, which adds none to scores"
            )
        attention.check_no_dropout(dropout_rate, deterministic=deterministic)
        scale = 1 / math.sqrt(query.shape[-1])  # As NNX's own attention has it.
        if self.cache is None:
            masks = () if mask is None else (mask,)
            if is_causal:
                count = query.shape[-3]
                causal = slots.seen(jnp.int32(count), count, count, self.window)
                masks = (*masks, causal)
            return attention.attend_with_masks(
                query, key, value, self.cfg, masks, scale
            )
        cache = kv_cache.append(self.cache.get_value(), key, value, self.cfg)
        self.cache.set_value(cache)
        return kv_cache.attend(query, cache, self.cfg, mask, scale)

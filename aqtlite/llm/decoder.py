"""The decoder: embeddings, layers of attention and an MLP, logits."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite import config
from aqtlite.flax.nnx import QuantizedCache
from aqtlite.llm.config import DecoderConfig
from aqtlite.llm.float_cache import FloatCache
from aqtlite.llm.layers import Linear, Normalization, Weight
from aqtlite.llm.rotary import rotated

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Attention(nnx.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, cfg: DecoderConfig, index: int, *, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        of_queries, of_keys = (
            heads * cfg.head_size for heads in (cfg.heads, cfg.kv_heads)
        )
        self.q = linear(of_queries, cfg.width, bias=cfg.qkv_bias)
        self.k = linear(of_keys, cfg.width, bias=cfg.qkv_bias)
        self.v = linear(of_keys, cfg.width, bias=cfg.qkv_bias)
        self.out = linear(cfg.width, of_queries, bias=cfg.out_bias)
        self.q_norm, self.k_norm = (
            nnx.data(
                Normalization(cfg.head_size, cfg.norm, cfg.eps, dtype=dtype)
                if cfg.qk_norm
                else None
            )
            for _ in range(2)
        )
        self.rope = cfg.ropes[index]
        self.size = cfg.head_size
        # Attention to a cache divides scores by the root of the size.
        root = math.sqrt(cfg.head_size)
        self.scale = 1.0 if cfg.score_scale is None else cfg.score_scale * root
        self.cached: FloatCache | QuantizedCache = FloatCache(window=cfg.windows[index])

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Maps ``(batch, positions, width)`` to the same shape."""
        q, k, v = (
            layer(x).reshape(*x.shape[:-1], -1, self.size)
            for layer in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = (rotated(one, positions, self.rope) for one in (q, k))
        if self.scale != 1.0:
            q = q * jnp.asarray(self.scale, q.dtype)
        attended = self.cached(q, k, v, is_causal=True)
        return self.out(attended.reshape(*x.shape[:-1], -1))


class Mlp(nnx.Module):
    """A gated MLP (Shazeer 2020, arXiv:2002.05202), or one without a gate."""

    def __init__(self, cfg: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, bias=cfg.mlp_bias, dtype=dtype, rngs=rngs)
        gate = linear(cfg.hidden, cfg.width) if cfg.gated else None
        self.gate: Linear | None = nnx.data(gate)
        self.up = linear(cfg.hidden, cfg.width)
        self.down = linear(cfg.width, cfg.hidden)
        self.activation = cfg.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(..., width)`` to the same shape."""
        activate, up = ACTIVATIONS[self.activation], self.up(x)
        hidden = activate(up) if self.gate is None else activate(self.gate(x)) * up
        return self.down(hidden)


class Layer(nnx.Module):
    """Attention and an MLP, each added to what it is given normalized."""

    def __init__(self, cfg: DecoderConfig, index: int, *, dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(
            Normalization, cfg.width, cfg.norm, cfg.eps, dtype=dtype
        )
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm, self.mlp_post_norm = (
            nnx.data(norm() if cfg.post_norms else None) for _ in range(2)
        )
        self.attention = Attention(cfg, index, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(cfg, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Maps ``(batch, positions, width)`` to the same shape."""
        added = self.attention(self.attention_norm(x), positions)
        if self.attention_post_norm is not None:
            added = self.attention_post_norm(added)
        x = x + added
        added = self.mlp(self.mlp_norm(x))
        if self.mlp_post_norm is not None:
            added = self.mlp_post_norm(added)
        return x + added


class Decoder(nnx.Module):
    """Logits of the next token, for each position.

    >>> from aqtlite.llm import DecoderConfig, Rope
    >>> cfg = DecoderConfig(
    ...     vocabulary=32, width=16, heads=4, kv_heads=2, head_size=4, hidden=24,
    ...     ropes=(Rope(),), windows=(None,),
    ... )
    >>> tokens = jnp.array([[3, 14, 15]])
    >>> nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0))(tokens)).shape
    (1, 3, 32)

    Args:
        cfg: what it consists of.
        dtype: dtype of float weights and of activations.
        rngs: random bits for the weights.
    """

    def __init__(self, cfg: DecoderConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        weight = functools.partial(Weight, dtype=dtype, rngs=rngs)
        self.cfg = cfg
        self.dtype = jnp.dtype(dtype)
        self.tokens = weight(cfg.vocabulary, cfg.width)
        learned = None if cfg.positions is None else weight(cfg.positions, cfg.width)
        self.positions: Weight | None = nnx.data(learned)
        self.layers = nnx.List(
            [Layer(cfg, i, dtype=dtype, rngs=rngs) for i in range(cfg.layers)]
        )
        self.norm = Normalization(cfg.width, cfg.norm, cfg.eps, dtype=dtype)
        head = None if cfg.tied else weight(cfg.vocabulary, cfg.width)
        self.head: Weight | None = nnx.data(head)

    def __call__(self, tokens: jax.Array, start: jax.typing.ArrayLike = 0) -> jax.Array:
        """Logits, ``(batch, positions, vocabulary)``; arguments as in `hidden`."""
        return self.logits(self.hidden(tokens, start))

    def hidden(self, tokens: jax.Array, start: jax.typing.ArrayLike = 0) -> jax.Array:
        """What logits are computed from, ``(batch, positions, width)``.

        Args:
            tokens: int, ``(batch, positions)``.
            start: position of the first of them; with a cache, the number of positions
                that are written.
        """
        positions = jnp.asarray(start) + jnp.arange(tokens.shape[-1])
        x = self.tokens.rows(tokens).astype(self.dtype)
        if self.cfg.embedding_scale != 1.0:
            x = x * jnp.asarray(self.cfg.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions.rows(positions).astype(self.dtype)
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits of what `hidden` returned."""
        return (self.tokens if self.head is None else self.head).contract(hidden)

    def init_caches(
        self,
        batch: int,
        length: int,
        cfg: config.DotGeneral | None = None,
        *,
        at_once: int = 1,
    ) -> None:
        """Gives every layer an empty cache.

        Args:
            batch: number of sequences.
            length: number of positions of the longest.
            cfg: config of quantized caches (`kv_cache.config_for`); None for floats.
            at_once: largest number of positions of one call, the prompt's.
        """
        for layer, window in zip(self.layers, self.cfg.windows, strict=True):
            cache: FloatCache | QuantizedCache = FloatCache(window=window)
            room = length
            if cfg is not None:
                ring = None if window is None or window >= length else window
                cache = QuantizedCache(cfg, window=ring)
                if ring is not None:
                    # It keeps the window of the first position of a call.
                    room = ring + at_once - 1
            shape = batch, room, self.cfg.kv_heads, self.cfg.head_size
            cache.init_cache(shape, self.dtype)
            layer.attention.cached = cache

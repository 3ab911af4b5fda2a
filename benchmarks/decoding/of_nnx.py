"""Decoders in NNX: one of Flax's layers, and Tunix's Llama with its own cache."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite import Rule, config
from aqtlite.flax.nnx import quantize_model
from benchmarks.decoding.subjects import INT8, Sizes, Subject

HAS_TUNIX = importlib.util.find_spec("tunix") is not None
RULES = [
    Rule(operands="weight", cfg=config.fully_quantized()),
    Rule(cfg=config.qat(8)),
]


class Block(nnx.Module):
    """Attention and an MLP, each behind a LayerNorm."""

    def __init__(self, sizes: Sizes, dtype: Any, rngs: nnx.Rngs):
        width, options = sizes.width, {"dtype": dtype, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(sizes.heads, width, **options)
        self.norms = nnx.List([nnx.LayerNorm(width, **options) for _ in range(2)])
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        y = self.norms[0](x)
        x = x + self.attention(y, mask=mask, decode=mask is None)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """Logits of the next token, in training or with a cache."""

    def __init__(self, sizes: Sizes, dtype: Any, rngs: nnx.Rngs):
        width, options = sizes.width, {"dtype": dtype, "rngs": rngs}
        self.tokens = nnx.Embed(sizes.vocabulary, width, **options)
        self.positions = nnx.Embed(sizes.length, width, **options)
        blocks = [Block(sizes, dtype, rngs) for _ in range(sizes.layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(width, **options)
        self.head = nnx.Linear(width, sizes.vocabulary, **options)

    def __call__(self, tokens: jax.Array, start: Any, mask: Any) -> jax.Array:
        x = self.tokens(tokens) + self.positions(start + jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def nnx_decoder(kind: str, dtype: str, sizes: Sizes) -> Subject:
    """A decoder of Flax's layers with their cache."""

    def with_cache(batch: int, size: int) -> Any:
        model = Decoder(sizes, jnp.dtype(dtype), nnx.Rngs(0))
        for block in model.blocks:
            block.attention.init_cache((batch, size, sizes.width), jnp.dtype(dtype))
        return nnx.split(_quantized(model, kind), nnx.Cache, ...)

    graph, _, params = with_cache(sizes.batch, sizes.length)

    def train(params: Any, tokens: jax.Array) -> jax.Array:
        empty = with_cache(1, 1)[1]
        model = nnx.merge(graph, empty, params)
        mask = nnx.make_causal_mask(tokens)
        return _normalized(model(tokens, 0, mask))

    def decode(params: Any, kept: Any, tokens: jax.Array, start: Any) -> Any:
        model = nnx.merge(graph, kept, params)
        out = model(tokens, start, None)
        return _normalized(out), nnx.state(model, nnx.Cache)

    def cache(batch: int, size: int) -> Any:
        return with_cache(batch, size)[1]

    return Subject(_cast(params, dtype), train, decode, cache)


def tunix_llama(kind: str, dtype: str, sizes: Sizes) -> Subject:
    """Tunix's Llama 3, of whom no line is changed, with its own cache."""
    from tunix.models.llama3 import model as llama3

    depth = sizes.width // sizes.heads
    made = llama3.ModelConfig(
        num_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        embed_dim=sizes.width,
        hidden_dim=2 * sizes.width,
        num_heads=sizes.heads,
        head_dim=depth,
        num_kv_heads=sizes.heads // 2,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    model = _quantized(llama3.Llama3(made, rngs=nnx.Rngs(0)), kind)
    graph, params = nnx.split(model)

    def call(params: Any, tokens: jax.Array, start: Any, kept: Any, size: int) -> Any:
        positions = start + jnp.arange(tokens.shape[1])
        mask = jnp.arange(size) <= positions[:, None]
        shape = (len(tokens), *mask.shape)
        out, kept = nnx.merge(graph, params)(
            tokens,
            jnp.broadcast_to(positions, tokens.shape),
            kept,
            jnp.broadcast_to(mask, shape),
        )
        return _normalized(out), kept

    def train(params: Any, tokens: jax.Array) -> jax.Array:
        return call(params, tokens, 0, None, tokens.shape[1])[0]

    def decode(params: Any, kept: Any, tokens: jax.Array, start: Any) -> Any:
        size = kept["layer_0"]["k"].shape[1]
        return call(params, tokens, start, kept, size)

    def cache(batch: int, size: int) -> Any:
        shape = (batch, size, sizes.heads // 2, depth)
        return {
            f"layer_{i}": {
                "k": jnp.zeros(shape, dtype),
                "v": jnp.zeros(shape, dtype),
                "end_index": jnp.zeros((batch,), jnp.int32),
            }
            for i in range(sizes.layers)
        }

    return Subject(_cast(params, dtype), train, decode, cache, takes_chunks=True)


def _quantized(model: nnx.Module, kind: str) -> nnx.Module:
    return quantize_model(model, RULES) if kind == INT8 else model


def _cast(params: Any, dtype: str) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        params,
    )


def _normalized(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))

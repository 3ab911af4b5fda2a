"""Transformer, quantized through the functions injected into its layers."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, QuantizedCache
from aqtlite_demo import corpus


class Transformer(nn.Module):
    """A pre-LN causal transformer over tokens.

    The same object is used to train, evaluate, convert and serve; a clone with
    ``decode=True`` generates token by token from the same variables.
    """

    layers: int
    width: int
    heads: int
    length: int
    """Longest sequence, and size of the KV cache."""
    cfg: config.DotGeneral | None = None
    """Config of every contraction, those of attention included; None leaves them in
    float."""
    dot_general: Callable | None = None
    """Replacement for ``AqtDotGeneral(cfg)``, from another library."""
    einsum: Callable | None = None
    """Replacement for ``AqtEinsum(cfg)`` in attention; None beside a `dot_general`
    leaves attention in float."""
    decode: bool = False
    """Take one token per call and continue from the ``cache`` collection."""
    cache: config.DotGeneral | None = None
    """Config of the KV cache for decoding; None keeps Flax's own, in float."""
    vocabulary: int = corpus.VOCABULARY
    """Number of tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token, ``(batch, length, vocabulary)``."""
        dot_general = self.dot_general or AqtDotGeneral(self.cfg)
        x = nn.Embed(self.vocabulary, self.width, name="tokens")(tokens)
        positions = self._positions(tokens.shape[1])
        x = x + nn.Embed(self.length, self.width, name="positions")(positions)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        # A quantized cache replaces Flax's own.
        attention_fn: Callable[..., jax.Array] = nn.dot_product_attention
        einsum = self.einsum
        if einsum is None and self.dot_general is None:
            einsum = AqtEinsum(self.cfg)
        if self.decode and self.cache is not None:
            attention_fn, einsum = QuantizedCache(self.cache), None
        einsum_cls = None if einsum is None else functools.partial(_given, einsum)
        for _ in range(self.layers):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(
                self.heads,
                decode=self.decode and self.cache is None,
                attention_fn=attention_fn,
                qkv_dot_general=dot_general,
                out_dot_general=dot_general,
                qk_attn_weights_einsum_cls=einsum_cls,
                attn_weights_value_einsum_cls=einsum_cls,
            )(y, mask=mask)
            y = nn.LayerNorm()(x)
            y = nn.gelu(nn.Dense(4 * self.width, dot_general=dot_general)(y))
            x = x + nn.Dense(self.width, dot_general=dot_general)(y)
        x = nn.LayerNorm()(x)
        return nn.Dense(self.vocabulary, dot_general=dot_general, name="logits")(x)

    def _positions(self, count: int) -> jax.Array:
        if not self.decode:
            return jnp.arange(count)
        initialized = self.has_variable("cache", "position")
        position = self.variable("cache", "position", jnp.zeros, (), jnp.int32)
        positions = position.value + jnp.arange(count)
        if initialized:
            position.value += count
        return positions


def _given(einsum: Callable) -> Callable:
    """Stands for a class whose instances are an einsum, as Flax takes it."""
    return einsum

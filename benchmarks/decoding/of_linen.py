"""Decoders in Linen: the demo's, and one whose layers are Flax's alone."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import quantize_model
from aqtlite_demo.model import Transformer
from benchmarks.decoding.subjects import INT8, QWIX, Sizes, Subject
from benchmarks.harness import contestants

CFG = config.fully_quantized()


def demo(kind: str, dtype: str, sizes: Sizes) -> Subject:
    """The demo's model, quantized by injected functions, with Flax's cache."""
    qwix = contestants.select([contestants.QWIX_NEAREST])[0].dot_general
    options = {INT8: {"cfg": CFG}, QWIX: {"dot_general": qwix}}.get(kind, {})
    trained = Transformer(
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        length=sizes.length,
        vocabulary=sizes.vocabulary,
        **options,
    )
    return _subject(
        trained, trained.clone(decode=True), dtype, sizes, lambda tokens, start: ()
    )


class Decoder(nn.Module):
    """A decoder of Flax's layers."""

    sizes: Sizes
    dtype: Any
    dot_general: Callable | None = None
    decode: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits of the next token."""
        of_dtype = {"dtype": self.dtype}
        dense = functools.partial(nn.Dense, dot_general=self.dot_general, **of_dtype)
        norm = functools.partial(nn.LayerNorm, **of_dtype)
        width = self.sizes.width
        x = nn.Embed(self.sizes.vocabulary, width, **of_dtype)(tokens)
        x = x + nn.Embed(self.sizes.length, width, **of_dtype)(positions)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        for _ in range(self.sizes.layers):
            attention = nn.MultiHeadDotProductAttention(
                self.sizes.heads,
                qkv_dot_general=self.dot_general,
                out_dot_general=self.dot_general,
                decode=self.decode,
                **of_dtype,
            )
            x = x + attention(norm()(x), mask=mask)
            x = x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))
        return dense(self.sizes.vocabulary)(norm()(x))


def linen(kind: str, dtype: str, sizes: Sizes) -> Subject:
    """A decoder quantized by rules, with Flax's cache."""
    qwix = contestants.select([contestants.QWIX_NEAREST])[0].dot_general
    of_float = Decoder(sizes, jnp.dtype(dtype), qwix if kind == QWIX else None)
    trained, decoder = of_float, of_float.clone(decode=True)
    if kind == INT8:
        trained, decoder = (quantize_model(x, CFG) for x in (trained, decoder))

    def positions(tokens: jax.Array, start: Any) -> tuple[jax.Array]:
        return (jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape),)

    return _subject(trained, decoder, dtype, sizes, positions)


def _subject(
    trained: nn.Module,
    decoder: nn.Module,
    dtype: str,
    sizes: Sizes,
    others: Callable[[jax.Array, Any], tuple[Any, ...]],
) -> Subject:
    """Makes a subject.

    Args:
        trained: the model for training.
        decoder: the model with a cache.
        dtype: dtype of the parameters.
        sizes: sizes.
        others: function of tokens and the position of the first, that returns the
            arguments behind the tokens.
    """
    first = jnp.zeros((1, sizes.length), int)
    init = jax.jit(trained.init)
    params = init(jax.random.key(0), first, *others(first, 0))
    params = jax.tree.map(lambda x: x.astype(dtype), {"params": params["params"]})

    def train(params: Any, tokens: jax.Array) -> jax.Array:
        return _normalized(trained.apply(params, tokens, *others(tokens, 0)))

    def decode(params: Any, kept: Any, tokens: jax.Array, start: Any) -> Any:
        out, changed = decoder.apply(
            {**params, "cache": kept}, tokens, *others(tokens, start), mutable=["cache"]
        )
        return _normalized(out), changed["cache"]

    def cache(batch: int, size: int) -> Any:
        tokens = jnp.zeros((batch, size), int)
        made = jax.eval_shape(
            decoder.init, jax.random.key(0), tokens, *others(tokens, 0)
        )
        dtypes = jax.tree.map(
            lambda x: dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype,
            made["cache"],
        )
        return jax.tree.map(
            lambda x, kind: jnp.zeros(x.shape, kind), made["cache"], dtypes
        )

    return Subject(params, train, decode, cache)


def _normalized(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))

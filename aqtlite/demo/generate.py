"""Autoregressive sampling with a KV cache."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, numerics
from aqtlite.demo.model import Transformer

TEMPERATURE = 0.7


def cache_config(dtype: str) -> config.DotGeneral | None:
    """The config of a KV cache that holds "float32", "int8" or "int4".

    Queries and probabilities have 8 bits; None for float32.
    """
    if dtype == "float32":
        return None
    cached = numerics.IntSymmetric(bits=int(dtype.removeprefix("int")))
    return config.update(config.qat(8), {"fwd.rhs.numerics": cached})


def init_cache(model: Transformer, batch: int = 1) -> Any:
    """An empty ``cache`` collection.

    Args:
        model: with ``decode=True``.
        batch: how many sequences.
    """
    tokens = jnp.zeros((batch, model.length), jnp.int32)
    abstract = jax.eval_shape(model.init, jax.random.key(0), tokens)["cache"]
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode_step(
    model: Transformer, variables: Any, cache: Any, token: jax.Array, key: jax.Array
) -> tuple[Any, jax.Array]:
    """Feed one token and sample the next.

    Returns:
        The updated cache and the next token, shaped like `token`: ``(1, 1)``.
    """
    logits, updated = model.apply(
        {**variables, "cache": cache}, token, mutable=["cache"]
    )
    sampled = jax.random.categorical(key, logits / TEMPERATURE)
    return updated["cache"], sampled.astype(token.dtype)


def generate(
    model: Transformer, variables: Any, prompt: np.ndarray, new_tokens: int, seed: int
) -> tuple[np.ndarray, float]:
    """Sample a continuation of a prompt.

    Args:
        model: as trained, with the config of the cache; it is cloned with
            ``decode=True`` here.
        variables: trained or serving variables of it.
        prompt: token ids, at least one; with `new_tokens` no longer than the
            model's context.
        new_tokens: number of tokens to sample, at least two.
        seed: the same seed gives the same text.

    Returns:
        The sampled token ids, and the median time per sampled token in seconds.
    """
    decoder = model.clone(decode=True)
    cache = init_cache(decoder)
    keys = jax.random.split(jax.random.key(seed), len(prompt) + new_tokens)
    for position, token in enumerate(prompt):
        token = jnp.full((1, 1), token, jnp.int32)
        cache, sampled = decode_step(decoder, variables, cache, token, keys[position])

    tokens, seconds = [sampled], []
    for key in keys[len(prompt) : -1]:
        start = time.perf_counter()
        cache, sampled = decode_step(decoder, variables, cache, sampled, key)
        sampled.block_until_ready()
        seconds.append(time.perf_counter() - start)
        tokens.append(sampled)
    return np.concatenate(tokens, axis=None), statistics.median(seconds)

"""Autoregressive sampling with a KV cache."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config, kv_cache
from aqtlite_demo.model import Transformer

TEMPERATURE = 0.7


def cache_config(dtype: str) -> config.DotGeneral | None:
    """The config of a KV cache of "int8", "int4" or "int3"; None for "float32"."""
    if dtype == "float32":
        return None
    return kv_cache.config_for(int(dtype.removeprefix("int")))


def init_cache(model: Transformer, batch: int = 1) -> Any:
    """An empty ``cache`` collection.

    Args:
        model: model with ``decode=True``.
        batch: number of sequences.
    """
    tokens = jnp.zeros((batch, model.length), jnp.int32)
    abstract = jax.eval_shape(model.init, jax.random.key(0), tokens)["cache"]
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)


def sample_next(
    model: Transformer, variables: Any, cache: Any, token: jax.Array, key: jax.Array
) -> tuple[Any, jax.Array]:
    """Feeds one token, and samples the next.

    Args:
        model: model with ``decode=True``.
        variables: trained or serving variables of the model.
        cache: the ``cache`` collection.
        token: current token of each sequence, ``(batch, 1)``.
        key: PRNG key for sampling.

    Returns:
        The updated cache, and the next token.
    """
    logits, updated = model.apply(
        {**variables, "cache": cache}, token, mutable=["cache"]
    )
    sampled = jax.random.categorical(key, logits / TEMPERATURE)
    return updated["cache"], sampled.astype(token.dtype)


def decode_step(model: Transformer, variables: Any) -> aqtlite.ServingProgram:
    """`sample_next` for one sequence, compiled with the variables bound.

    The program takes a cache, which is donated, a token and a key.

    Args:
        model: model with ``decode=True``.
        variables: trained or serving variables of the model.
    """
    return aqtlite.compile_serving(
        functools.partial(sample_next, model),
        variables,
        jax.eval_shape(lambda: init_cache(model)),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
        jax.eval_shape(lambda: jax.random.key(0)),
        donate_argnums=(1,),
    )


def generate(
    model: Transformer, variables: Any, prompt: np.ndarray, new_tokens: int, seed: int
) -> tuple[np.ndarray, float]:
    """Sample a continuation of a prompt.

    Args:
        model: model as trained, with the config of the cache; cloned here with
            ``decode=True``.
        variables: trained or serving variables of the model.
        prompt: token ids, at least one; prompt and `new_tokens` together must fit the
            model's context.
        new_tokens: number of tokens to sample, at least two.
        seed: seed that determines the text.

    Returns:
        The sampled token ids, and the median time per sampled token in seconds.
    """
    decoder = model.clone(decode=True)
    step, cache = decode_step(decoder, variables), init_cache(decoder)
    keys = jax.random.split(jax.random.key(seed), len(prompt) + new_tokens)
    for position, token in enumerate(prompt):
        token = jnp.full((1, 1), token, jnp.int32)
        cache, sampled = step(cache, token, keys[position])

    tokens, seconds = [sampled], []
    for key in keys[len(prompt) : -1]:
        start = time.perf_counter()
        cache, sampled = step(cache, sampled, key)
        sampled.block_until_ready()
        seconds.append(time.perf_counter() - start)
        tokens.append(sampled)
    return np.concatenate(tokens, axis=None), statistics.median(seconds)

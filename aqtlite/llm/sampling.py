"""Choosing the next token from logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Greedy decoding, or sampling from the likeliest tokens.

    >>> Sampling(temperature=0.7, top_p=0.9)
    Sampling(temperature=0.7, top_p=0.9)

    Raises:
        ValueError: if a field is out of its range.
    """

    temperature: float = 0.0
    """What logits are divided by; 0 takes the likeliest token."""

    top_p: float = 1.0
    """Probability of the smallest set of likeliest tokens to sample from (Holtzman et
    al. 2020, arXiv:1904.09751); 1 for all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def sample(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Samples a token for each row.

    Args:
        logits: ``(*batch, vocabulary)``.
        sampling: how.
        key: a `jax.random` key.

    Returns:
        int32, ``(*batch,)``.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    # The likeliest token stays finite, however small the temperature.
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits / max(sampling.temperature, _TINY)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        likelier = jnp.cumsum(jax.nn.softmax(ordered), axis=-1)
        # The first token is always kept, and each before which p is not reached.
        count = 1 + (likelier[..., :-1] < sampling.top_p).sum(-1, keepdims=True)
        least = jnp.take_along_axis(ordered, count - 1, axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)

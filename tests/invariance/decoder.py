"""A decoder with a cache: RMSNorm, RoPE, attention in float, a gated MLP."""

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config

VOCABULARY, WIDTH, HEADS, LAYERS = 17, 24, 2, 1
SIZE = WIDTH // HEADS


def parameters(seed=0, dtype="float32"):
    # Not of jax.random.normal, which differs between processors.
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype)

    def layer():
        names = ("query", "key", "value", "out")
        return {name: weight(WIDTH, WIDTH) for name in names} | {
            "norm": 1 + weight(WIDTH),
            "gate": weight(WIDTH, 2 * WIDTH),
            "up": weight(WIDTH, 2 * WIDTH),
            "down": weight(2 * WIDTH, WIDTH),
        }

    return {
        "table": weight(VOCABULARY, WIDTH) * 4,
        "layers": [layer() for _ in range(LAYERS)],
        "head": weight(WIDTH, VOCABULARY),
    }


def tokens(batch=3, length=21, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, (batch, length))


def cache(batch, length, dtype="float32"):
    shape = (batch, length, HEADS, SIZE)
    # What is left from other sequences must not matter.
    return [{"key": jnp.full(shape, 3, dtype), "value": jnp.full(shape, 5, dtype)}] * (
        LAYERS
    )


_DOT = aqtlite.make_dot_general(config.fully_quantized())


def _linear(x, w):
    return _DOT(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def _norm(x, gain):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale * gain).astype(x.dtype)


def _rope(x, positions):
    frequencies = 100.0 ** (-jnp.arange(SIZE // 2) / SIZE)
    angles = positions[:, None, None] * frequencies
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], -1
    )


def _attention(q, k, v, mask):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / SIZE**0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    # Masked slots may hold anything.
    v = jnp.where(mask.any(0)[:, None, None], v, 0)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def apply(params, tokens, start=0, first=0, kept=None):
    """Log-probabilities, and the cache.

    Args:
        params: the parameters.
        tokens: int, ``(batch, length)``.
        start: slot of the first token in the cache.
        first: slot of position 0, after left padding.
        kept: the cache; None for the whole sequence.
    """
    count = tokens.shape[1]
    slots = start + jnp.arange(count)
    size = count if kept is None else kept[0]["key"].shape[1]
    others = jnp.arange(size)
    mask = (others <= slots[:, None]) & (others >= first)
    x, after = params["table"][tokens], []
    for number, layer in enumerate(params["layers"]):
        h = _norm(x, layer["norm"])
        q, k, v = (
            _linear(h, layer[name]).reshape(*h.shape[:2], HEADS, SIZE)
            for name in ("query", "key", "value")
        )
        q, k = _rope(q, slots - first), _rope(k, slots - first)
        made = {"key": k, "value": v}
        if kept is not None:
            made = {
                name: jax.lax.dynamic_update_slice(
                    kept[number][name], one, (0, start, 0, 0)
                )
                for name, one in made.items()
            }
        after.append(made)
        out = _attention(q, made["key"], made["value"], mask)
        x = x + _linear(out.reshape(x.shape), layer["out"])
        h = _norm(x, layer["norm"])
        gated = jax.nn.silu(_linear(h, layer["gate"])) * _linear(h, layer["up"])
        x = x + _linear(gated, layer["down"])
    logits = (x @ params["head"]).astype(jnp.float32)
    return jax.nn.log_softmax(logits), after


def loss(params, tokens):
    log_probabilities, _ = apply(params, tokens)
    chosen = jnp.take_along_axis(log_probabilities[:, :-1], tokens[:, 1:, None], 2)
    return -chosen.mean(), log_probabilities

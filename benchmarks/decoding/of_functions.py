"""A decoder of plain functions: RMSNorm, RoPE, a float router, experts in int8."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config
from benchmarks.decoding.subjects import INT8, QWIX, Sizes, Subject
from benchmarks.harness import contestants

EXPERTS, CHOSEN = 4, 2


def experts(kind: str, dtype: str, sizes: Sizes) -> Subject:
    """A mixture of experts; attention, the router and the head stay in float."""
    dot_general = {
        INT8: aqtlite.make_dot_general(config.fully_quantized()),
        QWIX: contestants.select([contestants.QWIX_NEAREST])[0].dot_general,
    }.get(kind, jax.lax.dot_general)

    def train(params: Any, tokens: jax.Array) -> jax.Array:
        return _forward(params, tokens, 0, None, sizes, dot_general)[0]

    def decode(params: Any, kept: Any, tokens: jax.Array, start: Any) -> Any:
        return _forward(params, tokens, start, kept, sizes, dot_general)

    def cache(batch: int, size: int) -> Any:
        shape = (batch, size, sizes.heads, sizes.width // sizes.heads)
        return [(jnp.zeros(shape, dtype),) * 2 for _ in range(sizes.layers)]

    return Subject(_parameters(sizes, dtype), train, decode, cache, takes_chunks=True)


def _parameters(sizes: Sizes, dtype: str) -> Any:
    rng = np.random.default_rng(0)
    width = sizes.width

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, dtype)

    def layer() -> dict[str, jax.Array]:
        return {
            "qkv": weight(width, 3 * width),
            "out": weight(width, width),
            "router": weight(width, EXPERTS),
            "up": weight(EXPERTS, width, 2 * width),
            "down": weight(EXPERTS, 2 * width, width),
        }

    return {
        "table": weight(sizes.vocabulary, width) * 4,
        "layers": [layer() for _ in range(sizes.layers)],
        "head": weight(width, sizes.vocabulary),
    }


def _forward(
    params: Any,
    tokens: jax.Array,
    start: Any,
    kept: Any,
    sizes: Sizes,
    dot_general: Callable[..., jax.Array],
) -> tuple[jax.Array, Any]:
    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))

    positions = start + jnp.arange(tokens.shape[1])
    x, after = params["table"][tokens], []
    for number, layer in enumerate(params["layers"]):
        qkv = dot(_norm(x), layer["qkv"])
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * sizes.heads, -1), 3, 2)
        q, k = _rotated(q, positions), _rotated(k, positions)
        if kept is not None:
            k, v = (
                jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0))
                for old, new in zip(kept[number], (k, v), strict=True)
            )
        after.append((k, v))
        x = x + dot(_attended(q, k, v, positions).reshape(x.shape), layer["out"])
        x = x + _mixed(_norm(x), layer, dot)
    logits = (_norm(x) @ params["head"]).astype(jnp.float32)
    return jax.nn.log_softmax(logits), after


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 100.0 ** (-jnp.arange(half) / half)
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, -1)
    parts = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(parts, -1)


def _attended(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
) -> jax.Array:
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    mask = jnp.arange(k.shape[1]) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def _mixed(
    x: jax.Array, layer: Any, dot: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """The experts that a router in float chooses, each weighted by its probability."""
    routes = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
    best, which = jax.lax.top_k(routes, CHOSEN)
    out = jnp.zeros_like(x)
    for expert in range(EXPERTS):
        weight = jnp.sum(jnp.where(which == expert, best, 0), -1, keepdims=True)
        hidden = jax.nn.silu(dot(x, layer["up"][expert]))
        out = out + weight.astype(x.dtype) * dot(hidden, layer["down"][expert])
    return out

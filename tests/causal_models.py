"""Small models whose results depend, in float, on no later position and no padding.

All take activations ``[batch, time, features]`` and a mask ``[batch, time]`` of the
positions that count, and return activations of this shape. Memories are seen whole, so
positions of them that do not count are seen by none.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import AqtConvGeneralDilated, AqtDotGeneral, AqtEinsum

HEADS, KEY_HEADS, SIZE, LATENT, EXPERTS, CHUNK, STATE = 4, 2, 4, 6, 2, 4, 3
_LEAST = -1e30


def _sees(mask: jax.Array, window: int | None = None) -> jax.Array:
    """Which keys a query sees: ``[batch, 1, queries, keys]``."""
    time = jnp.arange(mask.shape[1])
    distance = time[:, None] - time
    seen = (distance >= 0) & (distance < (window or mask.shape[1]))
    return seen & mask[:, None, None]


def _probabilities(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(seen, scores, _LEAST))


def _cleared(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask[..., None], x, 0)


class Decoder(nn.Module):
    """Flax's attention and an MLP."""

    attention: Any = nn.MultiHeadDotProductAttention
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + self.attention(HEADS)(y, mask=_sees(mask))
        return x + self.dense(x.shape[-1])(nn.gelu(self.dense(32)(nn.LayerNorm()(x))))


class Grouped(nn.Module):
    """Heads of queries in groups, each with one head of keys and values."""

    @nn.compact
    def __call__(self, x, mask):
        q = nn.DenseGeneral((KEY_HEADS, HEADS // KEY_HEADS, SIZE), name="query")(x)
        k, v = (nn.DenseGeneral((KEY_HEADS, SIZE), name=name)(x) for name in "kv")
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
        weights = _probabilities(scores, _sees(mask)[:, None])
        y = jnp.einsum("bkgts,bskd->btkgd", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-3, -2, -1), name="out")(y)


class Library(nn.Module):
    """`jax.nn.dot_product_attention`."""

    @nn.compact
    def __call__(self, x, mask):
        q = nn.DenseGeneral((HEADS, SIZE), name="query")(x)
        k, v = (nn.DenseGeneral((KEY_HEADS, SIZE), name=name)(x) for name in "kv")
        y = jax.nn.dot_product_attention(q, k, v, mask=_sees(mask))
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(y)


class MultiQuery(nn.Module):
    """One head of keys and values for all heads of queries."""

    window: int | None = None

    @nn.compact
    def __call__(self, x, mask):
        q = nn.DenseGeneral((HEADS, SIZE), name="query")(x)
        k, v = (nn.Dense(SIZE, name=name)(x) for name in "kv")
        scores = jnp.einsum("bthd,bsd->bhts", q, k)
        weights = _probabilities(scores, _sees(mask, self.window))
        y = jnp.einsum("bhts,bsd->bthd", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(y)


class Latent(nn.Module):
    """Latent attention (DeepSeek-V2) with absorbed projections of keys and values."""

    @nn.compact
    def __call__(self, x, mask):
        latents = nn.Dense(LATENT, name="down")(x)
        init = nn.initializers.normal(0.5)
        up_k, up_v = (self.param(n, init, (HEADS, SIZE, LATENT)) for n in ("k", "v"))
        q = nn.DenseGeneral((HEADS, SIZE), name="query")(x)
        scores = jnp.einsum(
            "bthc,bsc->bhts", jnp.einsum("bthd,hdc->bthc", q, up_k), latents
        )
        weights = _probabilities(scores, _sees(mask))
        y = jnp.einsum("bhts,bsc->bthc", weights, latents)
        y = jnp.einsum("bthc,hdc->bthd", y, up_v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(y)


class Linear(nn.Module):
    """Linear attention in its parallel form: masked products, without a softmax."""

    @nn.compact
    def __call__(self, x, mask):
        q, k = (nn.elu(nn.Dense(SIZE, name=name)(x)) + 1 for name in "qk")
        v = nn.Dense(SIZE, name="v")(x)
        scores = jnp.einsum("btd,bsd->bts", q, k) * _sees(mask)[:, 0]
        y = jnp.einsum("bts,bsd->btd", scores, v)
        y = y / (1e-3 + scores.sum(-1, keepdims=True))
        return nn.Dense(x.shape[-1], name="out")(y)


class StateSpace(nn.Module):
    """A state space model in chunks, as Mamba-2 computes it, without decay."""

    @nn.compact
    def __call__(self, x, mask):
        x = _cleared(x, mask)
        b, c = (nn.Dense(STATE, name=name)(x) for name in "bc")
        u = _cleared(nn.Dense(SIZE, name="u")(x), mask)
        b, c, u = (y.reshape(y.shape[0], -1, CHUNK, y.shape[-1]) for y in (b, c, u))
        within = jnp.einsum("bnls,bnms->bnlm", c, b) * jnp.tril(
            jnp.ones((CHUNK, CHUNK))
        )
        states = jnp.einsum("bnls,bnld->bnsd", b, u)
        # Not a sum less the own states, which would leave a rounding error of them.
        before = jnp.cumsum(states[:, :-1], 1)
        before = jnp.pad(before, [(0, 0), (1, 0), (0, 0), (0, 0)])
        y = jnp.einsum("bnlm,bnmd->bnld", within, u)
        y = y + jnp.einsum("bnls,bnsd->bnld", c, before)
        return nn.Dense(x.shape[-1], name="out")(y.reshape(*x.shape[:2], SIZE))


class Convolution(nn.Module):
    """A causal convolution, by Flax's padding or by hand, dense or depthwise."""

    is_depthwise: bool = False
    is_padded_by_hand: bool = False
    conv_general_dilated: Any = None

    @nn.compact
    def __call__(self, x, mask):
        x = _cleared(x, mask)
        features = x.shape[-1]
        padding = "CAUSAL"
        if self.is_padded_by_hand:
            x, padding = jnp.pad(x, [(0, 0), (2, 0), (0, 0)]), "VALID"
        groups = features if self.is_depthwise else 1
        x = nn.Conv(
            features,
            (3,),
            padding=padding,
            feature_group_count=groups,
            conv_general_dilated=self.conv_general_dilated,
        )(x)
        # Rules have something to quantize if the convolution stays in float.
        return nn.Dense(features)(nn.relu(x))


class Experts(nn.Module):
    """A mixture of experts: tokens are dispatched and combined by one-hot products."""

    @nn.compact
    def __call__(self, x, mask):
        x = _cleared(x, mask)
        gates = jax.nn.softmax(nn.Dense(EXPERTS, name="router")(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS) * mask[..., None]
        slot = (jnp.cumsum(chosen, 1) - chosen).astype(int)
        dispatch = chosen[..., None] * jax.nn.one_hot(slot, x.shape[1])
        rows = jnp.einsum("btec,btd->becd", dispatch, x)
        init = nn.initializers.normal(0.3)
        up = self.param("up", init, (EXPERTS, x.shape[-1], 12))
        down = self.param("down", init, (EXPERTS, 12, x.shape[-1]))
        rows = nn.relu(jnp.einsum("becd,edf->becf", rows, up))
        rows = jnp.einsum("becf,efd->becd", rows, down)
        return jnp.einsum("btec,becd->btd", dispatch * gates[..., None], rows)


class SeveralExperts(nn.Module):
    """A mixture of experts of which each token chooses two, combined by an einsum."""

    equation: str = "btkec,btk->btec"

    @nn.compact
    def __call__(self, x, mask):
        x = _cleared(x, mask)
        gates = jax.nn.softmax(nn.Dense(EXPERTS, name="router")(x))
        weights, experts = jax.lax.top_k(gates, 2)
        chosen = jax.nn.one_hot(experts, EXPERTS, dtype=jnp.int32)
        chosen *= mask[..., None, None]
        before = jnp.cumsum(chosen.reshape(len(x), -1, EXPERTS), 1)
        slot = before.reshape(chosen.shape) * chosen - 1
        slots = jax.nn.one_hot(slot, 2 * x.shape[1])
        rows = jnp.einsum("btec,btd->becd", slots.sum(2), x)
        init = nn.initializers.normal(0.3)
        up = self.param("up", init, (EXPERTS, x.shape[-1], x.shape[-1]))
        rows = nn.relu(jnp.einsum("becd,edf->becf", rows, up))
        if "d" in self.equation:
            return jnp.einsum(self.equation, slots, weights, rows)
        combine = jnp.einsum(self.equation, slots, weights)
        return jnp.einsum("btec,becd->btd", combine, rows)


class Recurrent(nn.Module):
    """A recurrent layer, a scan over time."""

    @nn.compact
    def __call__(self, x, mask):
        return nn.RNN(nn.SimpleCell(x.shape[-1]))(_cleared(x, mask))


class CrossAttention(nn.Module):
    """Attention to a memory, of which some positions do not count."""

    @nn.compact
    def __call__(self, x, mask, memory, memory_mask):
        y = nn.MultiHeadDotProductAttention(HEADS)(
            x, memory, mask=memory_mask[:, None, None]
        )
        return _cleared(y, mask)


MODELS = {
    "decoder": Decoder(),
    "grouped queries": Grouped(),
    "jax.nn.dot_product_attention": Library(),
    "multi-query": MultiQuery(),
    "sliding window": MultiQuery(window=3),
    "latent attention": Latent(),
    "linear attention": Linear(),
    "state space": StateSpace(),
    "convolution": Convolution(),
    "padded convolution": Convolution(is_padded_by_hand=True),
    "depthwise convolution": Convolution(is_depthwise=True),
    "experts": Experts(),
    "two experts for a token": SeveralExperts(),
    "two experts, in one einsum": SeveralExperts("btkec,btk,becd->btd"),
    "recurrent": Recurrent(),
    "cross attention": CrossAttention(),
}


def injected(cfg: config.DotGeneral) -> dict[str, nn.Module]:
    """Models with injected functions in place of rules."""
    dot_general, einsum = AqtDotGeneral(cfg), functools.partial(AqtEinsum, cfg)
    dense = functools.partial(nn.Dense, dot_general=dot_general)
    attention = functools.partial(
        nn.MultiHeadDotProductAttention,
        qkv_dot_general=dot_general,
        out_dot_general=dot_general,
        qk_attn_weights_einsum_cls=einsum,
        attn_weights_value_einsum_cls=einsum,
    )
    return {
        "injected decoder": Decoder(attention, dense),
        "injected convolution": Convolution(
            conv_general_dilated=AqtConvGeneralDilated(cfg)
        ),
    }

"""The decoder in Linen: standard layers, quantized by rules or conversions as any.

`decoder` has the same decoder in NNX, whose weights have the orientation of files.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import QuantizedCache
from aqtlite.llm import float_cache
from aqtlite.llm.config import DecoderConfig, Norm, Rope
from aqtlite.llm.decoder import ACTIVATIONS
from aqtlite.llm.layers import normalized
from aqtlite.llm.rotary import turned_halves, turned_neighbors


class OfLayer(NamedTuple):
    """What differs between layers, as arrays that a scan can slice."""

    frequencies: jax.Array
    """Angles per position, ``(head size / 2,)``; zeros where nothing is rotated."""
    window: jax.Array
    """Number of last positions that are attended to, a scalar."""


class Normalization(nn.Module):
    """Normalization with its weights, as in the NNX decoder."""

    kind: Norm
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes an array along its last axis."""
        zeros, shape = nn.initializers.zeros, x.shape[-1:]
        fill = zeros if self.kind == "rms_plus_one" else nn.initializers.ones
        weight = self.param("weight", fill, shape, self.dtype)
        bias = None
        if self.kind == "layer":
            bias = self.param("bias", zeros, shape, self.dtype)
        return normalized(x, weight, bias, self.kind, self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    cfg: DecoderConfig
    dtype: Any
    cache: QuantizedCache | None

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, of_layer: OfLayer
    ) -> jax.Array:
        """Maps ``(batch, positions, width)`` to the same shape."""
        cfg = self.cfg
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.dtype)
        norm = functools.partial(Normalization, cfg.norm, cfg.eps, self.dtype)

        def heads(name: str, count: int) -> jax.Array:
            layer = dense(count * cfg.head_size, use_bias=cfg.qkv_bias, name=name)
            return layer(x).reshape(*x.shape[:-1], count, cfg.head_size)

        q, k = heads("q", cfg.heads), heads("k", cfg.kv_heads)
        v = heads("v", cfg.kv_heads)
        if cfg.qk_norm:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        if any(rope is not None for rope in cfg.ropes):
            is_interleaved = any(rope and rope.interleaved for rope in cfg.ropes)
            turn = turned_neighbors if is_interleaved else turned_halves
            angles = positions[:, None] * of_layer.frequencies
            q, k = turn(q, angles), turn(k, angles)
        if cfg.score_scale is not None:
            # Attention divides scores by the root of the size.
            scale = cfg.score_scale * math.sqrt(cfg.head_size)
            q = q * jnp.asarray(scale, q.dtype)
        if self.cache is None:
            seen = positions <= positions[:, None]
            seen &= positions > positions[:, None] - of_layer.window
            attended = float_cache.attend(q, k, v, seen)
        else:
            attended = self.cache(q, k, v)
        out = dense(cfg.width, use_bias=cfg.out_bias, name="out")
        return out(attended.reshape(*x.shape[:-1], -1))


class Mlp(nn.Module):
    """A gated MLP, or one without a gate."""

    cfg: DecoderConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(..., width)`` to the same shape."""
        cfg = self.cfg
        dense = functools.partial(
            nn.Dense, use_bias=cfg.mlp_bias, dtype=self.dtype, param_dtype=self.dtype
        )
        activate, up = ACTIVATIONS[cfg.activation], dense(cfg.hidden, name="up")(x)
        if not cfg.gated:
            hidden = activate(up)
        else:
            hidden = activate(dense(cfg.hidden, name="gate")(x)) * up
        return dense(cfg.width, name="down")(hidden)


class Layer(nn.Module):
    """Attention and an MLP, each added to what it is given normalized."""

    cfg: DecoderConfig
    dtype: Any
    cache: QuantizedCache | None

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, of_layer: OfLayer
    ) -> tuple[jax.Array, None]:
        """Maps ``(batch, positions, width)`` to the same shape, as a step of a scan."""
        cfg = self.cfg
        norm = functools.partial(Normalization, cfg.norm, cfg.eps, self.dtype)
        attention = Attention(cfg, self.dtype, self.cache, name="attention")
        added = attention(norm(name="attention_norm")(x), positions, of_layer)
        if cfg.post_norms:
            added = norm(name="attention_post_norm")(added)
        x = x + added
        added = Mlp(cfg, self.dtype, name="mlp")(norm(name="mlp_norm")(x))
        if cfg.post_norms:
            added = norm(name="mlp_post_norm")(added)
        return x + added, None


class LinenDecoder(nn.Module):
    """Logits of the next token, for each position, in Linen.

    Its layers are `nn.Dense` and `nn.Embed`: `aqtlite.flax.quantize_model` quantizes
    them by rules, and `aqtlite.flax.convert` keeps a file's integers, where
    `llm.load_linen` has filled the variables.

    >>> from aqtlite.llm import DecoderConfig, Rope
    >>> cfg = DecoderConfig(
    ...     vocabulary=32, width=16, heads=4, kv_heads=2, head_size=4, hidden=24,
    ...     ropes=(Rope(),) * 3, windows=(None,) * 3,
    ... )
    >>> tokens = jnp.array([[3, 14, 15]])
    >>> stacked = LinenDecoder(cfg, scan_layers=True)
    >>> shapes = jax.eval_shape(stacked.init, jax.random.key(0), tokens)
    >>> shapes["params"]["layers"]["mlp"]["up"]["kernel"].shape
    (3, 16, 24)

    Raises:
        ValueError: when it is called, if `scan_layers` and a cache or the layout of
            rotations would differ between layers.
    """

    cfg: DecoderConfig

    dtype: Any = jnp.float32
    """Dtype of weights and activations."""

    scan_layers: bool = False
    """Scan over layers, whose weights are stacked along a new first axis: the program
    is that of one layer."""

    cache: config.DotGeneral | None = None
    """Config of quantized caches (`kv_cache.config_for`); None attends to the positions
    of the call."""

    @nn.compact
    def __call__(self, tokens: jax.Array, start: jax.typing.ArrayLike = 0) -> jax.Array:
        """Logits, ``(batch, positions, vocabulary)``.

        Args:
            tokens: int, ``(batch, positions)``.
            start: position of the first of them; with a cache, the number of positions
                that are written.
        """
        cfg, of_layers = self.cfg, _of_layers(self.cfg)
        positions = jnp.asarray(start) + jnp.arange(tokens.shape[-1])
        embed = functools.partial(nn.Embed, dtype=self.dtype, param_dtype=self.dtype)
        table = embed(cfg.vocabulary, cfg.width, name="tokens")
        x = table(tokens)
        if cfg.embedding_scale != 1.0:
            x = x * jnp.asarray(cfg.embedding_scale, x.dtype)
        if cfg.positions is not None:
            x = x + embed(cfg.positions, cfg.width, name="positions")(positions)
        if self.scan_layers:
            layers = nn.scan(
                Layer,
                variable_axes={True: 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, 0),
                length=cfg.layers,
                metadata_params={nn.PARTITION_NAME: None},
            )
            stacked = layers(cfg, self.dtype, self._cache_of_all(), name="layers")
            x, _ = stacked(x, positions, of_layers)
        else:
            for i in range(cfg.layers):
                own = jax.tree.map(lambda one, i=i: one[i], of_layers)
                layer = Layer(cfg, self.dtype, self._cache_of(i), name=f"layers_{i}")
                x, _ = layer(x, positions, own)
        x = Normalization(cfg.norm, cfg.eps, self.dtype, name="norm")(x)
        if cfg.tied:
            return table.attend(x)
        head = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.dtype)
        return head(cfg.vocabulary, use_bias=False, name="head")(x)

    def _cache_of(self, index: int) -> QuantizedCache | None:
        if self.cache is None:
            return None
        return QuantizedCache(self.cache, self.cfg.windows[index])

    def _cache_of_all(self) -> QuantizedCache | None:
        if self.cache is not None and len(set(self.cfg.windows)) > 1:
            raise ValueError(
                f"scan_layers=True with a cache and windows of {self.cfg.windows}: "
                "stacked layers have caches of one length, so set scan_layers=False "
                "(llm.load_linen(..., scan_layers=False) loads the weights so)"
            )
        return self._cache_of(0)


def _of_layers(cfg: DecoderConfig) -> OfLayer:
    """What differs between layers, stacked; constants of the program."""
    layouts = {rope.interleaved for rope in cfg.ropes if rope is not None}
    if len(layouts) > 1:
        raise ValueError(
            "the ropes of a LinenDecoder are interleaved in all layers or in none"
        )
    frequencies = [_frequencies(rope, cfg.head_size) for rope in cfg.ropes]
    everything = np.iinfo(np.int32).max
    windows = [everything if one is None else one for one in cfg.windows]
    return OfLayer(jnp.asarray(np.stack(frequencies)), jnp.asarray(windows, jnp.int32))


def _frequencies(rope: Rope | None, size: int) -> np.ndarray:
    if rope is None:
        return np.zeros(len(range(0, size, 2)), np.float32)
    return rope.frequencies(size)

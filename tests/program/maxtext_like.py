"""A client as MaxText is: what its `AqtQuantization` does, and a decoder that takes it.

`Quantization` gives layers their contractions, with a config for each layer by regular
expressions, and a quantized KV cache. The decoder is a scan over rematerialized layers,
with a policy by name, and its parameters have logical axes, which frozen weights keep.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import calibration, config, remat
from aqtlite.flax import AqtDotGeneral, AqtEinsum, QuantizedCache, QuantMode

POLICIES = {
    "full": None,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_quantized": remat.save_quantized("layer_input"),
}


def weight_only(bits: int = 8, scale: float = 1.0, tile_size: int = -1):
    """The config of an entry of MaxText's files for mixed precision."""
    cfg = config.weight_only(bits)
    calibrated = calibration.AbsMax(clipping_scale=None if scale == 1.0 else scale)
    changes: dict[str, Any] = {"fwd.rhs.calibration": calibrated}
    if tile_size != -1:
        changes["fwd.rhs.blocks"] = config.Blocks(size=tile_size)
    return config.update(cfg, changes)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What layers ask for their contractions."""

    cfgs: tuple[tuple[str, config.DotGeneral], ...] = ()
    """Configs by regular expressions for paths of modules; the last that fits decides.
    A layer that none fits stays in float."""

    mode: QuantMode | None = None
    """None: the variables decide between training and serving, and `convert` is a
    function; SERVE refuses variables without frozen weights."""

    kv_bits: int = 8
    """Of the keys and values that are cached."""

    @classmethod
    def of_file(cls, rules: Mapping[str, Mapping[str, Any]], **kwargs: Any):
        """Mixed precision, as MaxText's ``quant_cfg_path`` has it."""
        default = (".*", config.weight_only(8))
        cfgs = ((path, weight_only(**fields)) for path, fields in rules.items())
        return cls((default, *cfgs), **kwargs)

    def _cfg(self, module: nn.Module) -> config.DotGeneral | None:
        path = "/".join(module.path)
        fitting = (cfg for rule, cfg in self.cfgs[::-1] if re.fullmatch(rule, path))
        return next(fitting, None)

    def dot_general(self, module: nn.Module) -> Callable[..., jax.Array]:
        return AqtDotGeneral(self._cfg(module), self.mode)

    def einsum(self, module: nn.Module) -> Callable[..., jax.Array]:
        return AqtEinsum(self._cfg(module), frozen_operands="none")

    def attend_to_cache(self) -> Callable[..., jax.Array]:
        return QuantizedCache(config.qat(self.kv_bits))


class DenseGeneral(nn.Module):
    features: tuple[int, ...]
    axes: tuple[str, ...]
    quant: Quantization
    num_contracted: int = 1

    @nn.compact
    def __call__(self, x):
        count = self.num_contracted
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(init, self.axes),
            (*x.shape[-count:], *self.features),
        )
        contracted = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
        return self.quant.dot_general(self)(x, kernel, (contracted, ((), ())))


class Attention(nn.Module):
    quant: Quantization
    decode: bool

    @nn.compact
    def __call__(self, x):
        axes = "embed", "heads", "kv"
        q, k, v = (
            DenseGeneral((2, 8), axes, self.quant, name=name)(x)
            for name in ("query", "key", "value")
        )
        if self.decode:
            out = self.quant.attend_to_cache()(q, k, v)
        else:
            einsum = self.quant.einsum(self)
            scores = einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(8)
            mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
            weights = nn.softmax(jnp.where(mask, scores, -1e9))
            out = einsum("bnts,bsnh->btnh", weights, v)
        return DenseGeneral((16,), axes[1:] + axes[:1], self.quant, 2, name="out")(out)


class Layer(nn.Module):
    quant: Quantization
    decode: bool

    @nn.compact
    def __call__(self, x, _):
        x = jax.ad_checkpoint.checkpoint_name(x, "layer_input")
        x = x + Attention(self.quant, self.decode, name="attention")(nn.RMSNorm()(x))
        up = DenseGeneral((32,), ("embed", "mlp"), self.quant, name="mlp_up")
        down = DenseGeneral((16,), ("mlp", "embed"), self.quant, name="mlp_down")
        return x + down(nn.silu(up(nn.RMSNorm()(x)))), None


class Decoder(nn.Module):
    quant: Quantization = Quantization()
    policy: str = "full"
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="embed")(tokens)
        layer = nn.remat(Layer, prevent_cse=False, policy=POLICIES[self.policy])
        layers = nn.scan(
            layer,
            variable_axes={"params": 0, "aqt": 0, "cache": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.quant, self.decode, name="layers")(x, None)
        return DenseGeneral((32,), ("embed", "vocab"), self.quant, name="logits")(x)

"""Layers with frozen weights and bfloat16 activations, of each library."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, convert
from benchmarks.harness import contestants
from benchmarks.harness.contestants import AQTLITE, AQTP, BFLOAT16, RNG_STREAM
from benchmarks.harness.peers import aqt_flax, qwix

QWIX = "qwix"


def bfloat16_sums(cfg: config.DotGeneral) -> config.DotGeneral:
    """Rounds the sums of all contractions to bfloat16 before they are scaled."""
    return config.update(cfg, {"*.dg_accumulator_dtype": jnp.bfloat16})


CONFIGS = {
    f"{AQTLITE}, int8": contestants.aqtlite_config(),
    f"{AQTLITE}, int8, bfloat16 sums": bfloat16_sums(contestants.aqtlite_config()),
    f"{AQTLITE}, fp8": config.fp8(per_tensor=True),
    f"{AQTLITE}, fp8, bfloat16 sums": bfloat16_sums(config.fp8(per_tensor=True)),
    f"{AQTLITE}, weight-only int8": config.weight_only(8),
    f"{AQTLITE}, weight-only int8, bfloat16 sums": bfloat16_sums(config.weight_only(8)),
    f"{AQTLITE}, weight-only int4": config.weight_only(4),
}

Activation = Callable[[jax.Array], jax.Array]


def _identity(x: jax.Array) -> jax.Array:
    return x


def layers(
    widths: Sequence[int], activation: Activation = _identity
) -> dict[str, tuple[Callable, Any]]:
    """For each contestant, a function of variables and x, and the variables.

    Args:
        widths: width of the input, and of each layer.
        activation: what is applied between two layers.
    """
    x, key = jnp.ones((1, widths[0]), jnp.bfloat16), jax.random.key(0)
    sizes = tuple(widths[1:])
    plain = Layers(sizes, activation)
    variables = plain.init(key, x)
    wide = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables)
    served: dict[str, tuple[Callable, Any]] = {BFLOAT16: (plain.apply, wide)}
    for name, cfg in CONFIGS.items():
        model = Layers(sizes, activation, functools.partial(AqtDotGeneral, cfg))
        served[name] = (model.apply, convert(model, variables, x))

    def aqtp(mode: aqt_flax.QuantMode) -> nn.Module:
        dot_general_cls = functools.partial(
            aqt_flax.AqtDotGeneral,
            contestants.aqtp_config(),
            rhs_quant_mode=mode,
            rhs_freeze_mode=aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        )
        return Layers(sizes, activation, dot_general_cls)

    _, frozen = aqtp(aqt_flax.QuantMode.CONVERT).apply(
        wide, x, rngs={RNG_STREAM: key}, mutable=["aqt"]
    )
    serve = functools.partial(
        aqtp(aqt_flax.QuantMode.SERVE).apply, rngs={RNG_STREAM: key}
    )
    # In serving, aqtp still requires the float kernels, but does not read them.
    served[f"{AQTP}, int8"] = (serve, {**wide, **frozen})
    kernels = [layer["kernel"] for layer in wide["params"].values()]
    for name, (weights, inputs, channels) in _QWIX.items():
        served[f"{QWIX}, {name}"] = (
            functools.partial(_qwix_layers, activation, inputs, channels),
            [
                qwix.quantize(kernel, weights, channelwise_axes=(1,))
                for kernel in kernels
            ],
        )
    return served


class Layers(nn.Module):
    """Layers without biases, each with a `dot_general` of its own."""

    widths: tuple[int, ...]
    activation: Activation
    dot_general_cls: Callable[[], Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies one layer after the other."""
        for number, width in enumerate(self.widths):
            x = self.activation(x) if number else x
            x = nn.Dense(
                width,
                use_bias=False,
                dtype=jnp.bfloat16,
                dot_general_cls=self.dot_general_cls,
            )(x)
        return x


_QWIX: dict[str, tuple[str, str | None, tuple[int, ...] | None]] = {
    "int8": ("int8", "int8", (0,)),
    "fp8": ("float8_e4m3fn", "float8_e4m3fn", (0,)),
    "weight-only int8": ("int8", None, None),
}
"""Dtypes of Qwix's weights and activations, and the channels of activations."""


def _qwix_layers(
    activation: Activation,
    qtype: str | None,
    channels: tuple[int, ...] | None,
    kernels: list[Any],
    x: jax.Array,
) -> jax.Array:
    for number, kernel in enumerate(kernels):
        x = activation(x) if number else x
        given = x
        if qtype:
            given = qwix.quantize(x, qtype, channelwise_axes=channels)
        x = qwix.dot_general(given, kernel, (((1,), (0,)), ((), ())))
        x = x.astype(jnp.bfloat16)
    return x

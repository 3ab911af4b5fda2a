"""A mixture-of-experts layer, trained and served, against float32 and the peers.

    python -m benchmarks --only moe

A router chooses two of eight experts for each token. Rows are sorted by expert and
contracted with `ragged_dot`. aqtp quantizes only the forward pass of `ragged_dot`, and
is therefore excluded from training steps.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from aqtlite import config
from aqtlite.flax import AqtRaggedDot, convert
from benchmarks.harness import figures, timing
from benchmarks.harness.contestants import (
    AQTLITE,
    AQTLITE_NEAREST,
    AQTP_NEAREST,
    FLOAT32,
    QWIX_NEAREST,
)
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.harness.peers import aqt_config, aqt_ragged_dot, ragged_dot_qt

WEIGHT_ONLY = "aqtlite, weight-only"

WIDTH, HIDDEN, TRAINED, SERVED = 512, 1024, 1024, (1, 8, 64)
QUICK_WIDTH, QUICK_HIDDEN, QUICK_TRAINED, QUICK_SERVED = 16, 32, 32, (2,)
"""Sizes of the layer, and the numbers of tokens."""


class MixtureOfExperts(nn.Module):
    """Two layers of experts, and a router that chooses some of them for each token.

    Rows of tokens are sorted by expert, so that rows of the same expert are adjacent.
    """

    hidden: int
    ragged_dot: Callable[..., Any] = lax.ragged_dot
    experts: int = 8
    chosen: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens of shape ``(tokens, width)`` to tokens of equal shape."""
        tokens, width = x.shape
        probabilities = nn.softmax(nn.Dense(self.experts, name="router")(x))
        weights, experts = lax.top_k(probabilities, self.chosen)
        weights = weights / weights.sum(-1, keepdims=True)

        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.experts)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, self.hidden))
        down = self.param("down", init, (self.experts, self.hidden, width))

        rows = x[order // self.chosen]
        rows = nn.gelu(self.ragged_dot(rows, up, sizes))
        rows = self.ragged_dot(rows, down, sizes)
        rows = rows[jnp.argsort(order)].reshape(tokens, self.chosen, width)
        return jnp.sum(rows * weights[:, :, None], axis=1)


def training_step(model: MixtureOfExperts, optimizer: Any) -> Callable[..., Any]:
    """The function ``(params, state, x, y) -> (params, state, loss)``."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def qwix_ragged_dot(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    """Qwix's `ragged_dot`, in int8 forward and backward."""
    cfg = ragged_dot_qt.RaggedDotQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    return ragged_dot_qt.ragged_dot_qt(lhs, rhs, sizes, cfg)


def aqtp_ragged_dot(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    """aqtp's `ragged_dot`, in int8 forward."""
    cfg = aqt_config.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)
    return aqt_ragged_dot.ragged_dot(lhs, rhs, sizes, cfg=cfg)


NEAREST = config.fully_quantized(use_stochastic_rounding=False)
TRAINING = {
    FLOAT32: lax.ragged_dot,
    QWIX_NEAREST: qwix_ragged_dot,
    AQTLITE: AqtRaggedDot(config.fully_quantized()),
    AQTLITE_NEAREST: AqtRaggedDot(NEAREST),
    WEIGHT_ONLY: AqtRaggedDot(config.weight_only()),
}
SERVING = {
    FLOAT32: lax.ragged_dot,
    AQTP_NEAREST: aqtp_ragged_dot,
    QWIX_NEAREST: qwix_ragged_dot,
    AQTLITE_NEAREST: AqtRaggedDot(NEAREST),
    WEIGHT_ONLY: AqtRaggedDot(config.weight_only()),
}
"""aqtlite serves frozen weights; the peers quantize them at every call."""


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """A training step, and serving with several numbers of tokens."""
    width, hidden, trained, served = (
        (QUICK_WIDTH, QUICK_HIDDEN, QUICK_TRAINED, QUICK_SERVED)
        if options.quick
        else (WIDTH, HIDDEN, TRAINED, SERVED)
    )
    model = MixtureOfExperts(hidden)
    x, y = jax.random.normal(jax.random.key(0), (2, trained, width))
    params = model.init(jax.random.key(1), x)["params"]
    report(f"width {width}, training step")
    programs = {
        name: training_program(model.clone(ragged_dot=dot), params, x, y)
        for name, dot in TRAINING.items()
    }
    measured = _compare(programs, width, "training step", trained, options)
    for tokens in served:
        report(f"width {width}, serving {tokens} tokens")
        programs = {
            name: serving_program(model.clone(ragged_dot=dot), params, x[:tokens])
            for name, dot in SERVING.items()
        }
        measured += _compare(programs, width, "serving", tokens, options)
    return measured


def _compare(
    programs: dict[str, Callable[[], Any]],
    width: int,
    what: str,
    tokens: int,
    options: Options,
) -> list[Figure]:
    spreads = timing.alternate(
        programs, repeats=options.repeats, seconds=options.seconds
    )
    return figures.compare(
        "moe", {"width": width, "program": what, "tokens": tokens}, spreads
    )


def training_program(
    model: MixtureOfExperts, params: Any, x: jax.Array, y: jax.Array
) -> Callable[[], Any]:
    """A compiled training step."""
    optimizer = optax.sgd(1e-2)
    step = jax.jit(training_step(model, optimizer))
    return functools.partial(step, params, optimizer.init(params), x, y)


def serving_program(
    model: MixtureOfExperts, params: Any, x: jax.Array
) -> Callable[[], Any]:
    """A compiled forward pass, with frozen weights if the model is quantized."""
    variables = {"params": params}
    if isinstance(model.ragged_dot, AqtRaggedDot):
        variables = convert(model, variables, x)
    return functools.partial(jax.jit(model.apply), variables, x)

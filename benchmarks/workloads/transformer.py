"""Training step of a transformer, end to end, against float32 and the peers.

    python -m benchmarks --only transformer

The architecture of `aqtlite_demo.model.Transformer` with the contestants' contractions
in every projection; cross-entropy, its gradients, and Adam's update.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from aqtlite_demo import corpus
from benchmarks.harness import contestants, figures, timing
from benchmarks.harness.contestants import RNG_STREAM, Contestant
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

LAYERS, WIDTH, HEADS, SHAPE = 4, 1024, 16, (4, 128)
QUICK_LAYERS, QUICK_WIDTH, QUICK_HEADS, QUICK_SHAPE = 1, 64, 4, (2, 32)

NAMES = (
    contestants.FLOAT32,
    contestants.AQTP,
    contestants.AQTP_NEAREST,
    contestants.QWIX_NEAREST,
    contestants.AQTLITE,
    contestants.AQTLITE_NEAREST,
)


class Transformer(nn.Module):
    """A pre-LN causal transformer over bytes."""

    layers: int
    width: int
    heads: int
    dot_general_cls: Callable[[], Any] | None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token, ``(batch, length, 256)``."""

        def dense(features: int) -> nn.Dense:
            return nn.Dense(features, dot_general_cls=self.dot_general_cls)

        length = tokens.shape[1]
        x = nn.Embed(corpus.VOCABULARY, self.width)(tokens)
        x = x + nn.Embed(length, self.width)(jnp.arange(length))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(
                self.heads,
                qkv_dot_general_cls=self.dot_general_cls,
                out_dot_general_cls=self.dot_general_cls,
            )(nn.LayerNorm()(x), mask=mask)
            y = nn.gelu(dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + dense(self.width)(y)
        return dense(corpus.VOCABULARY)(nn.LayerNorm()(x))


def training_step(model: Transformer, optimizer: Any) -> Callable[..., Any]:
    """The compiled ``(params, state, tokens, key) -> (params, state, loss)``."""

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        rngs = {RNG_STREAM: key}
        logits = model.apply({"params": params}, tokens[:, :-1], rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def step(params: Any, state: Any, tokens: jax.Array, key: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step)


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """One step from the same parameters, for each contestant."""
    layers, width, heads, (batch, length) = (
        (QUICK_LAYERS, QUICK_WIDTH, QUICK_HEADS, QUICK_SHAPE)
        if options.quick
        else (LAYERS, WIDTH, HEADS, SHAPE)
    )
    report(f"{layers} layers, width {width}, training step")
    key = jax.random.key(0)
    tokens = jax.random.randint(key, (batch, length + 1), 0, corpus.VOCABULARY)
    model = Transformer(layers, width, heads, None)
    params = model.init(key, tokens[:, :-1])["params"]
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)

    def program(contestant: Contestant) -> Callable[[], Any]:
        step = training_step(
            model.clone(dot_general_cls=contestant.dot_general_cls), optimizer
        )
        return lambda: step(params, state, tokens, key)

    spreads = timing.alternate(
        {c.name: program(c) for c in contestants.select(NAMES)},
        repeats=options.repeats,
        seconds=options.seconds,
    )
    case = {"layers": layers, "width": width, "tokens": f"{batch} x {length}"}
    return figures.compare("transformer", case, spreads)

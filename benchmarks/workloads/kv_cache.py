"""Decoding with a quantized KV cache, against Flax's own in float32.

    python -m benchmarks --only kv_cache

The demo's transformer, with equal frozen int8 weights in all rows. At each context:

- token: time of one decoding step at the last position of the context;
- cache: bytes over all layers;
- loss: of a trained model on held-out text, fed position by position through the cache
  (teacher forcing), relative to the float32 cache.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from aqtlite import config
from aqtlite_demo import artifact, corpus, generate, training
from aqtlite_demo.model import Transformer
from benchmarks.harness import figures, timing
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

CACHES = ("float32", "int8", "int4", "int3")

CFG = config.fully_quantized()
TRANSFORMER = Transformer(layers=4, width=512, heads=8, length=4096, cfg=CFG)
QUICK_TRANSFORMER = Transformer(layers=1, width=32, heads=2, length=64, cfg=CFG)
CONTEXTS, QUICK_CONTEXTS = (128, 4096), (16,)

TRAINED = Transformer(layers=4, width=192, heads=4, length=128, cfg=CFG)
QUICK_TRAINED = Transformer(layers=1, width=32, heads=2, length=16, cfg=CFG)
STEPS, QUICK_STEPS = 360, 2
BATCH, VALIDATION_BATCHES = 8, 8


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Time and bytes at each context size, and the loss."""
    model = QUICK_TRANSFORMER if options.quick else TRANSFORMER
    measured = []
    for context in QUICK_CONTEXTS if options.quick else CONTEXTS:
        report(f"{model.layers} layers, width {model.width}, context {context}")
        measured += at_context(model.clone(length=context), options)
    model = QUICK_TRAINED if options.quick else TRAINED
    steps = QUICK_STEPS if options.quick else STEPS
    report(f"{model.layers} layers, width {model.width}, {steps} steps, loss")
    found = losses(model, steps, decoders(model))
    differences = {name: loss - found["float32"] for name, loss in found.items()}
    case = {**_case(model), "phase": "loss"}
    return measured + figures.exact("kv_cache", case, differences, "nats")


def _case(model: Transformer) -> dict[str, Any]:
    return {"layers": model.layers, "width": model.width, "context": model.length}


def decoders(model: Transformer) -> dict[str, Transformer]:
    """The decoding model with each cache."""
    return {
        name: model.clone(decode=True, cache=generate.cache_config(name))
        for name in CACHES
    }


def at_context(model: Transformer, options: Options) -> list[Figure]:
    """Seconds of a token, and bytes of the cache."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    serving = artifact.serving_variables(model, variables)
    spreads = timing.alternate(
        {name: token(one, serving) for name, one in decoders(model).items()},
        repeats=options.repeats,
        seconds=options.seconds,
    )
    held = {name: cache_bytes(one) for name, one in decoders(model).items()}
    case = _case(model)
    return [
        *figures.compare("kv_cache", {**case, "phase": "token"}, spreads),
        *figures.exact("kv_cache", {**case, "phase": "cache"}, held, "bytes"),
    ]


def token(decoder: Transformer, serving: Any) -> Callable[[], Any]:
    """A decoding step at the last position, which donates the cache."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(serving: Any, cache: Any, position: jax.Array) -> tuple[Any, jax.Array]:
        def placed(path: Any, leaf: jax.Array) -> jax.Array:
            name = getattr(path[-1], "key", None)
            is_position = name in ("cache_index", "position")
            return position if is_position else leaf

        cache = jax.tree_util.tree_map_with_path(placed, cache)
        first, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
        return generate.sample_next(decoder, serving, cache, first, key)

    cache, last = generate.init_cache(decoder), jnp.int32(decoder.length - 1)

    def call() -> jax.Array:
        nonlocal cache
        cache, out = step(serving, cache, last)
        return out

    return call


def cache_bytes(decoder: Transformer) -> int:
    """Bytes on the device."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(generate.init_cache(decoder)))


def losses(
    model: Transformer,
    steps: int,
    by_cache: Mapping[str, Transformer],
    batches: int = VALIDATION_BATCHES,
) -> dict[str, float]:
    """The loss of the trained model on held-out text, with each cache.

    Args:
        model: the model to train.
        steps: number of training steps.
        by_cache: the decoding model with each cache.
        batches: number of batches of the held-out text.
    """
    text = corpus.standard_library(model.length)
    validation = text.validation_batches(batches, BATCH, model.length)
    runs = training.train_side_by_side(
        {"trained": model},
        text.batches(BATCH, model.length, 0),
        validation,
        steps=steps,
        lr=1e-3,
        seed=0,
        on_step=lambda *_: None,
    )
    serving = artifact.serving_variables(model, runs["trained"].variables)
    return {
        name: float(np.mean([forced_loss(one, serving, batch) for batch in validation]))
        for name, one in by_cache.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def forced_loss(decoder: Transformer, serving: Any, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte, with tokens fed one by one."""

    def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        variables = {**serving, "cache": cache}
        logits, updated = decoder.apply(variables, token[:, None], mutable=["cache"])
        return updated["cache"], logits[:, 0]

    cache = generate.init_cache(decoder, len(batch))
    _, logits = jax.lax.scan(step, cache, batch[:, :-1].T)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch[:, 1:].T
    ).mean()

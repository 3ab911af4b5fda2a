"""Time to trace and to compile a training step, beside float32 and aqtp.

    python -m benchmarks --only compile

A model of 12 blocks of two `nn.Dense` without a scan, forward and backward, with JAX's
caches cleared before every repeat.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.harness import contestants, figures, timing
from benchmarks.harness.contestants import RNG_STREAM, Contestant
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

BLOCKS, QUICK_BLOCKS = 12, 2
WIDTH = 64
REPEATS, QUICK_REPEATS = 3, 1
"""Repeats, at most: one takes many seconds, and they spread little."""

NAMES = (
    contestants.FLOAT32,
    contestants.AQTP,
    contestants.AQTP_NEAREST,
    contestants.AQTLITE,
    contestants.AQTLITE_NEAREST,
)


class Mlp(nn.Module):
    """Residual blocks of two layers."""

    dot_general_cls: Callable[[], Any] | None
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, dot_general_cls=self.dot_general_cls)
        for _ in range(self.blocks):
            y = dense(4 * WIDTH)(nn.LayerNorm()(x))
            x = x + dense(WIDTH)(nn.relu(y))
        return x


def traced(contestant: Contestant, blocks: int) -> jax.stages.Traced:
    """The training step, traced with JAX's caches cleared."""
    model = Mlp(contestant.dot_general_cls, blocks)
    x = jnp.ones((4, 16, WIDTH))
    rngs = {RNG_STREAM: jax.random.key(0)}
    params = jax.eval_shape(model.init, rngs, x)["params"]

    def loss(params: Any) -> jax.Array:
        out: Any = model.apply({"params": params}, x, rngs=rngs)
        return out.sum()

    jax.clear_caches()
    return jax.jit(jax.grad(loss)).trace(params)


def measure(contestant: Contestant, blocks: int) -> dict[str, float]:
    """Seconds to trace, and to lower and compile."""
    start = time.perf_counter()
    step = traced(contestant, blocks)
    middle = time.perf_counter()
    step.lower().compile()
    return {"trace": middle - start, "compile": time.perf_counter() - middle}


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Both times, for each contestant in turn."""
    blocks = QUICK_BLOCKS if options.quick else BLOCKS
    compared = contestants.select(NAMES)
    samples: dict[str, list[dict[str, float]]] = {c.name: [] for c in compared}
    repeats = min(QUICK_REPEATS if options.quick else REPEATS, options.repeats)
    for repeat in range(repeats):
        report(f"{blocks} blocks, repeat {repeat + 1} of {repeats}")
        for contestant in compared:
            samples[contestant.name].append(measure(contestant, blocks))
    measured = []
    for phase in ("trace", "compile"):
        spreads = {
            name: timing.spread([sample[phase] for sample in taken])
            for name, taken in samples.items()
        }
        case = {"blocks": blocks, "phase": phase}
        measured += figures.compare("compile", case, spreads)
    return measured

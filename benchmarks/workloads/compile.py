"""Time to trace, lower and compile a training step, against float32, aqtp and Qwix.

    python -m benchmarks --only compile

An MLP of 1, 4, 12 and 24 blocks of two `nn.Dense`, forward and backward; with 12 blocks
also the forward pass alone, and a scan over the blocks. JAX's caches are cleared before
every repeat, and the cache on disk is not used. Every contestant is first compiled once
unmeasured, at the smallest size, so that none pays for loading modules. Times are
processor time over all threads, which other programs disturb less.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.harness import contestants, figures, timing
from benchmarks.harness.contestants import RNG_STREAM, Contestant
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

BLOCKS = 12
SEVERAL_BLOCKS, QUICK_BLOCKS = (1, 4, BLOCKS, 24), (2,)
WIDTH = 64
REPEATS, QUICK_REPEATS = 3, 1
"""Maximum number of repeats: each takes many seconds, and the spread is small."""

GRADIENT, FORWARD, SCAN = "gradient", "forward", "gradient of a scan"

NAMES = (
    contestants.FLOAT32,
    contestants.AQTP,
    contestants.AQTP_NEAREST,
    contestants.QWIX_STOCHASTIC,
    contestants.QWIX_NEAREST,
    contestants.AQTLITE,
    contestants.AQTLITE_NEAREST,
)


class Block(nn.Module):
    """A residual block of two layers, also used as the body of a scan."""

    dot_general_cls: Callable[[], Any] | None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        dense = functools.partial(nn.Dense, dot_general_cls=self.dot_general_cls)
        y = dense(4 * WIDTH)(nn.LayerNorm()(x))
        return x + dense(WIDTH)(nn.relu(y)), None


class Mlp(nn.Module):
    """Residual blocks, unrolled or as a scan."""

    dot_general_cls: Callable[[], Any] | None
    blocks: int
    scan: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scan:
            scanned = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.blocks,
            )
            return scanned(self.dot_general_cls)(x, None)[0]
        for _ in range(self.blocks):
            x, _ = Block(self.dot_general_cls)(x)
        return x


def traced(
    contestant: Contestant, blocks: int, what: str = GRADIENT
) -> jax.stages.Traced:
    """A pass of the model, traced with JAX's caches cleared."""
    model = Mlp(contestant.dot_general_cls, blocks, scan=what == SCAN)
    x = jnp.ones((4, 16, WIDTH))
    rngs = {RNG_STREAM: jax.random.key(0)}
    params = jax.eval_shape(model.init, rngs, x)["params"]

    def loss(params: Any) -> jax.Array:
        out: Any = model.apply({"params": params}, x, rngs=rngs)
        return out.sum()

    jax.clear_caches()
    return jax.jit(loss if what == FORWARD else jax.grad(loss)).trace(params)


def measure(contestant: Contestant, blocks: int, what: str) -> dict[str, float]:
    """Seconds to trace and lower, to compile, and to do both."""
    start = time.process_time()
    lowered = traced(contestant, blocks, what).lower()
    middle = time.process_time()
    lowered.compile()
    end = time.process_time()
    return {
        "trace and lower": middle - start,
        "compile": end - middle,
        "both": end - start,
    }


@contextlib.contextmanager
def _without_cache_on_disk() -> Iterator[None]:
    """Disables JAX's compilation cache on disk, so that every program is compiled."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """The times of every case, for each contestant in turn."""
    several = QUICK_BLOCKS if options.quick else SEVERAL_BLOCKS
    cases = [(blocks, GRADIENT) for blocks in several]
    if not options.quick:
        cases += [(BLOCKS, FORWARD), (BLOCKS, SCAN)]
    compared = contestants.select(NAMES)
    repeats = min(QUICK_REPEATS if options.quick else REPEATS, options.repeats)
    measured = []
    with _without_cache_on_disk():
        for contestant in compared:
            measure(contestant, 1, GRADIENT)
        for blocks, what in cases:
            samples: dict[str, list[dict[str, float]]] = {c.name: [] for c in compared}
            for repeat in range(repeats):
                report(f"{what}, {blocks} blocks, repeat {repeat + 1} of {repeats}")
                for contestant in compared:
                    samples[contestant.name].append(measure(contestant, blocks, what))
            for phase in ("trace and lower", "compile", "both"):
                spreads = {
                    name: timing.spread([sample[phase] for sample in taken])
                    for name, taken in samples.items()
                }
                case = {"program": what, "blocks": blocks, "phase": phase}
                measured += figures.compare("compile", case, spreads)
    return measured

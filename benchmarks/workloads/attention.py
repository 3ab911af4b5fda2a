"""An attention block forward and forward + backward, against float and the peers.

    python -m benchmarks --only attention

Flax's multi-head self-attention, with the four projections quantized by each library;
the products of queries, keys and values stay in float.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.harness import contestants, figures, phases, timing
from benchmarks.harness.contestants import RNG_STREAM, Contestant
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

WIDTH, HEADS, SHAPE = 512, 8, (4, 256)
QUICK_WIDTH, QUICK_HEADS, QUICK_SHAPE = 64, 4, (2, 16)


def module(contestant: Contestant, heads: int) -> nn.Module:
    """The block, with equal variables for every contestant."""
    return nn.MultiHeadDotProductAttention(
        heads,
        dtype=contestant.dtype,
        qkv_dot_general_cls=contestant.dot_general_cls,
        out_dot_general_cls=contestant.dot_general_cls,
    )


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Both phases."""
    width, heads, shape = (
        (QUICK_WIDTH, QUICK_HEADS, QUICK_SHAPE)
        if options.quick
        else (WIDTH, HEADS, SHAPE)
    )
    key = jax.random.key(0)
    x = jax.random.normal(key, (*shape, width))
    compared = contestants.select()
    params = module(compared[0], heads).init(key, x)["params"]

    def forward(contestant: Contestant) -> Callable[..., jax.Array]:
        def apply(params: dict, x: jax.Array) -> jax.Array:
            variables, rngs = {"params": params}, {RNG_STREAM: key}
            out = module(contestant, heads).apply(variables, x, rngs=rngs)
            return jnp.asarray(out, jnp.float32)

        return apply

    forwards = {contestant.name: forward(contestant) for contestant in compared}
    measured = []
    for phase in phases.PHASES:
        case = {"width": width, "tokens": f"{shape[0]} x {shape[1]}", "phase": phase}
        report(f"width {width}, {phase}")
        spreads = timing.alternate(
            phases.programs(forwards, (params, x), phase),
            repeats=options.repeats,
            seconds=options.seconds,
        )
        measured += figures.compare("attention", case, spreads)
    return measured

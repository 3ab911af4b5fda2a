"""An MLP block forward and forward + backward, against float, the peers and the floor.

    python -m benchmarks --only mlp

Two layers, width -> 4 width -> relu -> width, on 1024 tokens, as a 2-D and a 3-D input.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.harness import contestants, figures, floor, phases, timing
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.figures import BARE, Figure
from benchmarks.harness.options import Options

WIDTHS = (512, 1024, 2048)
TOKENS = 1024
QUICK_WIDTHS = (128,)
QUICK_TOKENS = 128
SEQUENCES = 8
"""Size of the leading axis of the 3-D input."""


def block(contestant: Contestant, x: Any, w1: Any, w2: Any) -> jax.Array:
    """The two layers, without biases."""
    x, w1, w2 = (array.astype(contestant.dtype) for array in (x, w1, w2))
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    hidden = jax.nn.relu(contestant.dot_general(x, w1, dims))
    return contestant.dot_general(hidden, w2, dims).astype("float32")


def weights(width: int) -> tuple[jax.Array, jax.Array]:
    """Gaussian weights of the two layers, as at initialization."""
    up, down = jax.random.split(jax.random.key(1))
    return (
        jax.random.normal(up, (width, 4 * width)) / width**0.5,
        jax.random.normal(down, (4 * width, width)) / (4 * width) ** 0.5,
    )


def measure(
    lead: tuple[int, ...],
    width: int,
    phase: str,
    compared: Sequence[Contestant],
    options: Options,
) -> dict[str, timing.Spread]:
    """Seconds of each contestant and of the floor, for an input ``(*lead, width)``."""
    x = jax.random.normal(jax.random.key(2), (*lead, width))
    forwards = {c.name: functools.partial(block, c) for c in compared}
    programs = phases.programs(forwards, (x, *weights(width)), phase)
    contractions = [
        *floor.matmul(lead, width, 4 * width, phase),
        *floor.matmul(lead, 4 * width, width, phase),
    ]
    programs[BARE] = floor.program(contractions)
    spreads = timing.alternate(
        programs, repeats=options.repeats, seconds=options.seconds
    )
    floor.add(spreads, contractions)
    return spreads


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """All widths, both inputs, both phases."""
    widths, tokens = (QUICK_WIDTHS, QUICK_TOKENS) if options.quick else (WIDTHS, TOKENS)
    measured = []
    for width in widths:
        for lead in ((tokens,), (SEQUENCES, tokens // SEQUENCES)):
            for phase in phases.PHASES:
                case = {"width": width, "input": f"{len(lead) + 1}-D", "phase": phase}
                report(f"width {width}, {case['input']}, {phase}")
                spreads = measure(lead, width, phase, contestants.select(), options)
                measured += figures.compare("mlp", case, spreads)
    return measured

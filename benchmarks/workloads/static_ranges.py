"""One row through frozen layers: static ranges against dynamic scales and float.

    python -m benchmarks --only static_ranges

A dynamic scale needs the maximum of the row before the row can be rounded; a static
scale is known in advance. Each measurement times many consecutive calls: a single call
would mostly measure Python and dispatch.
"""

from collections.abc import Callable

import flax.linen as nn
import jax

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, calibrate, convert
from benchmarks.harness import figures, timing
from benchmarks.harness.contestants import FLOAT32
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

DYNAMIC, STATIC = "dynamic", "static"
CONFIGS = {
    FLOAT32: None,
    DYNAMIC: config.fully_quantized(),
    STATIC: config.static_int8(),
}

CASES = ((512, 1), (2048, 1), (512, 8))
QUICK_CASES = ((64, 1), (64, 2))
"""Widths and numbers of layers."""

CALLS = 100


class Mlp(nn.Module):
    """Square layers."""

    width: int
    layers: int
    cfg: config.DotGeneral | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            x = nn.relu(x) if i else x
            x = nn.Dense(self.width, dot_general=AqtDotGeneral(self.cfg))(x)
        return x


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Every width and number of layers."""
    measured = []
    for width, layers in QUICK_CASES if options.quick else CASES:
        report(f"{layers} x {width}, one row")
        x = jax.random.normal(jax.random.key(0), (1, width))
        programs = {
            name: program_of(Mlp(width, layers, cfg), x)
            for name, cfg in CONFIGS.items()
        }
        case = {"width": width, "layers": layers, "calls": CALLS}
        spreads = timing.alternate(
            programs, repeats=40 * options.repeats, seconds=options.seconds
        )
        measured += figures.compare("static_ranges", case, spreads)
    return measured


def program_of(model: Mlp, x: jax.Array) -> Callable[[], jax.Array]:
    """Repeated calls of a model on one row, with frozen weights unless it is float."""
    variables = model.init(jax.random.key(1), x)
    if model.cfg == CONFIGS[STATIC]:
        variables = calibrate(model, variables, [x])
    if model.cfg is not None:
        variables = convert(model, variables, x)
    # At this size, flattening a pytree in Python takes as long as a kernel.
    leaves, treedef = jax.tree.flatten(variables)
    compiled = jax.jit(
        lambda leaves, x: model.apply(jax.tree.unflatten(treedef, leaves), x)
    )

    def calls() -> jax.Array:
        return [compiled(leaves, x) for _ in range(CALLS)][-1]

    return calls

"""Two small layers: a training step, and served with frozen weights.

    python -m benchmarks --only small
    NPROC=1 python -m benchmarks --only small

The second command keeps XLA:CPU to one thread. At these sizes, dispatch and the number
of kernels decide. Each measurement times consecutive calls, each of which takes the
result of the one before.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.program.compiled import undivided
from benchmarks.harness import contestants, figures, timing
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

CONFIGS = {
    contestants.FLOAT32: None,
    contestants.AQTLITE: config.fully_quantized(),
    contestants.AQTLITE_NEAREST: config.fully_quantized(use_stochastic_rounding=False),
}

TRAINING, UNDIVIDED, SERVED = "training step", "undivided step", "served"
"""An undivided step runs each loop on one thread."""

CASES = ((64, 64), (64, 128), (64, 256), (256, 128))
CASES += tuple((1, width) for width in (64, 128, 256, 512))
QUICK_CASES = ((8, 16),)
"""Numbers of rows, and widths. A single row is only served."""

CALLS = 50


class Mlp(nn.Module):
    """Two square layers."""

    width: int
    cfg: config.DotGeneral | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, dot_general=AqtDotGeneral(self.cfg))(x)
        return nn.Dense(self.width, dot_general=AqtDotGeneral(self.cfg))(nn.relu(x))


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Every number of rows and width, in training and served."""
    measured = []
    for rows, width in QUICK_CASES if options.quick else CASES:
        for phase in (TRAINING, UNDIVIDED, SERVED) if rows > 1 else (SERVED,):
            report(f"{rows} rows, width {width}, {phase}")
            x = jax.random.normal(jax.random.key(0), (rows, width))
            programs = {
                name: _program(phase, Mlp(width, cfg), x)
                for name, cfg in CONFIGS.items()
                if phase != SERVED or name != contestants.AQTLITE_NEAREST
            }
            spreads = timing.alternate(
                programs, repeats=10 * options.repeats, seconds=options.seconds
            )
            case = {"rows": rows, "width": width, "calls": CALLS, "phase": phase}
            measured += figures.compare("small", case, spreads)
    return measured


def _program(phase: str, model: Mlp, x: jax.Array) -> Callable[[], Any]:
    if phase == SERVED:
        return _served(model, x)
    return _training(model, x, undivided.UNDIVIDED if phase == UNDIVIDED else {})


def _training(model: Mlp, x: jax.Array, options: dict[str, str]) -> Callable[[], Any]:
    """Consecutive steps of gradient descent."""

    @functools.partial(jax.jit, compiler_options=options)
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((model.apply({"params": params}, x) - x) ** 2)

        gradient = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

    start = model.init(jax.random.key(1), x)["params"]

    def steps() -> Any:
        params = start
        for _ in range(CALLS):
            params = step(params, x)
        return params

    return steps


def _served(model: Mlp, x: jax.Array) -> Callable[[], jax.Array]:
    """Consecutive calls of a compiled model."""
    variables = model.init(jax.random.key(1), x)
    if model.cfg is not None:
        variables = convert(model, variables, x)
    program = aqtlite.compile_serving(model.apply, variables, x)

    def calls() -> jax.Array:
        out = x
        for _ in range(CALLS):
            out = program(out)
        return out

    return calls

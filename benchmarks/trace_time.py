"""Time to trace and to compile a training step, beside float32 and aqtp.

    python -m benchmarks.trace_time

A model of 12 blocks of two `nn.Dense` without a scan, forward and backward; medians of
several runs with JAX's caches cleared, the contestants in turn in one process. Needs
the `test` extra.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from aqt.jax.v2 import config as aqt_config
from aqt.jax.v2.flax import aqt_flax
from rich.console import Console
from rich.table import Table

from aqtlite import config
from aqtlite.flax import AqtDotGeneral


class Mlp(nn.Module):
    """Residual blocks of two layers."""

    dot_general_cls: Callable[[], Any] | None
    blocks: int = 12
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, dot_general_cls=self.dot_general_cls)
        for _ in range(self.blocks):
            y = dense(4 * self.width)(nn.LayerNorm()(x))
            x = x + dense(self.width)(nn.relu(y))
        return x


def contestants() -> dict[str, Callable[[], Any] | None]:
    """What each library passes as ``dot_general_cls``."""
    return {
        "float32": None,
        "aqtlite": functools.partial(AqtDotGeneral, config.fully_quantized()),
        "aqtp": functools.partial(aqt_flax.AqtDotGeneral, aqt_config.fully_quantized()),
        "aqtp, nearest rounding": functools.partial(
            aqt_flax.AqtDotGeneral,
            aqt_config.fully_quantized(use_stochastic_rounding=False),
        ),
    }


def measure(dot_general_cls: Callable[[], Any] | None) -> tuple[float, float]:
    """Seconds to trace, and to lower and compile."""
    model = Mlp(dot_general_cls)
    x = jnp.ones((4, 16, model.width))
    rngs = {"params": jax.random.key(0)}
    variables = model.init(rngs, x)

    def loss(params: Any) -> jax.Array:
        return model.apply({"params": params}, x, rngs=rngs).sum()

    jax.clear_caches()
    start = time.perf_counter()
    traced = jax.jit(jax.grad(loss)).trace(variables["params"])
    middle = time.perf_counter()
    traced.lower().compile()
    return middle - start, time.perf_counter() - middle


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants()}
    for _ in range(repeats):
        for name, dot_general_cls in contestants().items():
            times[name].append(measure(dot_general_cls))
    medians = {name: np.median(values, axis=0) for name, values in times.items()}
    table = Table("", "trace, s", "compile, s", "trace / float32", "compile / float32")
    for name, values in medians.items():
        ratios = values / medians["float32"]
        table.add_row(
            name,
            *(f"{value:.2f}" for value in values),
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    Console().print(table)


if __name__ == "__main__":
    main()

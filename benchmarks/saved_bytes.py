"""Memory of a whole gradient, as `aqtlite.report` finds it: float32 and int8.

    python -m benchmarks.saved_bytes [--layers N] [--width N]

Compiles the gradient of the demo's transformer, and runs nothing. Prints the bytes that
the traced program saves for the backward pass, the temporary memory of the compiled
one, and its peak.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import aqtlite
from aqtlite import config
from aqtlite.reporting.report import Report
from aqtlite_demo import training
from aqtlite_demo.model import Transformer
from benchmarks.harness import arguments as arguments_lib

BATCH, LENGTH = 16, 64


def of_gradient(layers: int, width: int, cfg: config.DotGeneral | None) -> Report:
    """Reports the gradient of a transformer."""
    model = Transformer(layers, width, 4, LENGTH, cfg=cfg)
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    gradient = jax.grad(lambda v, x: training.loss_fn(model, v, x))
    return aqtlite.report(gradient, variables, batch, params=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the bytes of both, and their ratios."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.saved_bytes",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--layers", type=arguments_lib.positive, default=4)
    parser.add_argument("--width", type=arguments_lib.positive, default=192)
    asked = parser.parse_args(arguments)
    exact, quantized = (
        of_gradient(asked.layers, asked.width, cfg)
        for cfg in (None, config.fully_quantized())
    )
    memories = exact.memory, quantized.memory
    pairs = [("saved for the backward pass", exact.saved_bytes, quantized.saved_bytes)]
    if memories[0] is not None and memories[1] is not None:
        pairs += [
            ("temporary", memories[0].temporary, memories[1].temporary),
            ("peak", memories[0].peak, memories[1].peak),
        ]
    for name, before, after in pairs:
        print(f"{name}: {before:,} bytes in float32, {after:,} in int8", end="")
        print(f", {after / before:.2f} x")


if __name__ == "__main__":
    main()

"""What it costs to measure the rounding of every operand, every n steps.

    python -m benchmarks.tap_cost [--layers N] [--width N] [--every N]

A training step of the demo's transformer in int8, and the same step with
`aqtlite.tap`, by turns: the median of the ratios in one round, and what remains of it
where one in `--every` steps is tapped.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import aqtlite
from aqtlite import config
from aqtlite_demo import training
from aqtlite_demo.model import Transformer
from benchmarks.harness import arguments as arguments_lib


def steps(layers: int, width: int) -> tuple[dict[str, Callable[..., Any]], Any]:
    """A training step and the tapped one, and their arguments."""
    model = Transformer(layers, width, 4, 128, cfg=config.fully_quantized())
    batch = jax.random.randint(jax.random.key(0), (16, 129), 0, 256)
    tx = training.optimizer(1e-3, 100)
    variables = jax.jit(model.init)(jax.random.key(1), batch[:, :-1])

    def step(variables: Any, state: Any, batch: Any) -> Any:
        def loss(variables: Any) -> Any:
            return training.loss_fn(model, variables, batch)

        value, gradient = jax.value_and_grad(loss)(variables)
        updates, state = tx.update(gradient, state, variables)
        return value, jax.tree.map(jax.numpy.add, variables, updates), state

    programs = {"step": jax.jit(step), "tapped": aqtlite.tap(step)}
    return programs, (variables, tx.init(variables), batch)


def ratio(layers: int, width: int, rounds: int) -> float:
    """The median of the time of a tapped step by that of a step in the same round."""
    programs, arguments = steps(layers, width)
    found = []
    for number in range(rounds + 1):
        taken = {}
        for name in sorted(programs, reverse=bool(number % 2)):
            begin = time.perf_counter()
            jax.block_until_ready(programs[name](*arguments))
            taken[name] = time.perf_counter() - begin
        if number:  # The first compiles.
            found.append(taken["tapped"] / taken["step"])
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tap_cost",
        description=(__doc__ or "").splitlines()[0],
    )
    for name, default in (
        ("layers", 2),
        ("width", 256),
        ("every", 100),
        ("rounds", 20),
    ):
        parser.add_argument(
            f"--{name}", type=arguments_lib.positive, default=default, metavar="N"
        )
    asked = parser.parse_args(arguments)
    found = ratio(asked.layers, asked.width, asked.rounds)
    print(f"a tapped step takes {found:.2f} x the time of a step")
    print(f"every {asked.every} steps: {100 * (found - 1) / asked.every:+.2f} %")


if __name__ == "__main__":
    main()

"""Count the collectives of a training step and of serving.

    python -m benchmarks.collectives

An MLP, 512 -> 2048 -> 512, on 8 simulated CPU devices, under the usual sharding
strategies. Counts the collectives in the compiled program, and the bytes of their
results per device. The last column is the largest difference of the updated weights, or
of the output, from a run on one device. Needs the `test` extra, which installs aqtp and
qwix.
"""

import argparse
import collections
from collections.abc import Iterator, Sequence

import jax

from aqtlite.reporting.collectives import Collective
from benchmarks.collectives import serving, training
from benchmarks.collectives.strategies import DEVICES, STRATEGIES, Sizes, Strategy
from benchmarks.harness import contestants, tables


def rows(
    strategies: Sequence[Strategy], sizes: Sizes
) -> Iterator[tuple[str, str, list[Collective], float]]:
    """Strategy, contestant, collectives and difference for each table row."""
    for strategy in strategies:
        for contestant in contestants.select(training.NAMES):
            found, from_one_device = training.train(contestant, strategy, sizes)
            yield strategy.name, contestant.name, found, from_one_device()
    for name, how in serving.served().items():
        yield (
            f"serving {serving.SERVING_ROWS} rows, 2 x 4",
            name,
            *serving.serve(*how, sizes),
        )


def describe(collectives: Sequence[Collective]) -> str:
    """Number of collectives of each kind."""
    kinds = collections.Counter[str]()
    for one in collectives:
        kinds[one.op] += one.times
    return ", ".join(f"{times} {kind}" for kind, times in kinds.items())


def _bytes(one: Collective) -> int:
    """Bytes of the results on one device, over all executions."""
    return one.times * sum(result.bytes for result in one.results)


def simulate_devices() -> None:
    """Simulates CPU devices; takes effect only before JAX initializes its backend."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that everything runs"
    )
    quick = parser.parse_args(arguments).quick
    simulate_devices()
    sizes = Sizes(32, 64, 8, 8, 16) if quick else Sizes()
    lines = ["| strategy | | collectives | MB | of them | from one device |"]
    lines.append("| --- | --- | ---: | ---: | --- | ---: |")
    for strategy, name, collectives, off in rows(STRATEGIES, sizes):
        times = sum(one.times for one in collectives)
        size = sum(map(_bytes, collectives)) / 2**20
        kinds = describe(collectives)
        lines.append(
            f"| {strategy} | {name} | {times} | {size:.3f} | {kinds} | {off:.1e} |"
        )
    for line in lines:
        tables.console().print(line, soft_wrap=True)


if __name__ == "__main__":
    main()

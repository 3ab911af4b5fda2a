"""Compare training with moments in 8 bits and in float.

    python -m benchmarks.optimizer_states [--seeds 0 1 2] [--steps N] [--width N]

Trains the transformer of `aqtlite demo` in float32 with AdamW, from the same weights
and on the same batches, with the states of the optimizer in float, in 8 bits on the
dynamic grid (`aqtlite.quantize_optimizer`) and on a linear grid, which shows what the
dynamic one is for. The three take turns at every step. Prints the validation loss after
training for each seed, the bytes of the state, and the median time per step.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import aqtlite
from aqtlite import config, numerics
from aqtlite_demo import corpus as corpus_lib
from aqtlite_demo import training
from aqtlite_demo.model import Transformer

_LINEAR = config.Tensor(
    numerics=numerics.IntSymmetric(bits=8), blocks=config.Blocks(size=256, fit=True)
)
STATES = {
    "float32": None,
    "dynamic, 8 bits": config.OptimizerStates(),
    "linear, 8 bits": config.OptimizerStates(first=_LINEAR, second=_LINEAR),
}


class Kind(NamedTuple):
    """An optimizer, compiled."""

    init: Callable[..., Any]
    step: Callable[..., Any]

    @classmethod
    def of(
        cls, cfg: config.OptimizerStates | None, model: Transformer, options: Any
    ) -> "Kind":
        """The optimizer of the demo, with its moments held as a config says."""
        tx = training.optimizer(options.lr, options.steps)
        if cfg is not None:
            tx = aqtlite.quantize_optimizer(tx, cfg)
        return cls(tx.init, training.make_step(model, tx))


def compare(
    options: argparse.Namespace,
    corpus: corpus_lib.Corpus,
    model: Transformer,
    kinds: Mapping[str, Kind],
    seed: int,
) -> dict[str, tuple[float, int, float]]:
    """Trains with each kind of state; returns loss, bytes and seconds of each."""
    validation = corpus.validation_batches(8, 32, options.length)
    variables = jax.jit(model.init)(jax.random.key(seed), validation[0][:, :-1])
    # Each step donates what it is given.
    runs = {
        name: (jax.tree.map(jnp.copy, variables), kind.init(variables))
        for name, kind in kinds.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    batches = corpus.batches(options.batch, options.length, seed)
    for batch in itertools.islice(batches, options.steps):
        for name, (params, state) in runs.items():
            start = time.perf_counter()
            made = kinds[name].step(params, state, batch)
            params, state, _ = jax.block_until_ready(made)
            seconds[name].append(time.perf_counter() - start)
            runs[name] = params, state
    loss = jax.jit(lambda v, batch: training.loss_fn(model, v, batch))
    return {
        name: (
            training.evaluate(loss, params, validation),
            sum(x.nbytes for x in jax.tree.leaves(state)),
            statistics.median(seconds[name][1:] or seconds[name]),
        )
        for name, (params, state) in runs.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)
    corpus = corpus_lib.standard_library(options.length)
    model = Transformer(
        layers=options.layers, width=options.width, heads=4, length=options.length
    )
    kinds = {name: Kind.of(cfg, model, options) for name, cfg in STATES.items()}
    found = [compare(options, corpus, model, kinds, seed) for seed in options.seeds]
    print(f"| state | {' | '.join(f'seed {i}' for i in options.seeds)} | bytes | ms |")
    print("| --- |" + " ---: |" * (len(found) + 2))
    for name in STATES:
        losses = " | ".join(f"{one[name][0]:.3f}" for one in found)
        _, nbytes, seconds = found[0][name]
        print(f"| {name} | {losses} | {nbytes:,} | {1e3 * seconds:.1f} |")


if __name__ == "__main__":
    main()

"""Round the weights of a trained transformer by several methods, and compare losses.

    python -m benchmarks.quality.rounding [--seeds N ...] [--quick]

Trains the demo's transformer in float32 for each seed, quantizes the kernels of all
layers to an affine grid with a scale for each 128 inputs, and prints the increase of
the validation loss, in nats per byte.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.demo import corpus as corpus_lib
from aqtlite.demo import training as demo_training
from aqtlite.demo.model import Transformer
from aqtlite.flax import calibrate_in_float, convert
from benchmarks.harness import arguments as arguments_lib
from benchmarks.quality import presets, training

BITS = (4, 3)
CALIBRATION_BATCHES = 12
"""Batches of the training text from which statistics are gathered."""


def configs(bits: int) -> dict[str, config.DotGeneral]:
    """The configs to compare, by the name of their method."""
    search = config.gptq(bits)
    changes: dict[str, dict[str, Any]] = {
        "nearest": {
            "fwd.rhs.calibration": calibration.MinMax(),
            "fwd.rhs.rounding": None,
        },
        "MseSearch": {"fwd.rhs.rounding": None},
        "GPTQ": {"fwd.rhs.calibration": calibration.MinMax()},
        "GPTQ, own order": {"fwd.rhs.rounding": config.Gptq(act_order=False)},
        "GPTQ and MseSearch": {},
        "GPTQ and MseSearch, symmetric": {
            "fwd.rhs.numerics": numerics.IntSymmetric(bits=bits)
        },
    }
    return {name: config.update(search, one) for name, one in changes.items()}


def trained(options: training.Options, corpus: corpus_lib.Corpus, seed: int) -> Any:
    """The variables of a transformer trained in float32."""
    preset = presets.select(presets.FLOAT32)
    step, _ = training.programs(preset, options)
    variables, opt_state = training.initial(preset, options, corpus, seed)
    batches = corpus.batches(options.batch, options.length, seed)
    key = jax.random.key(seed)
    for _ in range(options.steps):
        variables, opt_state, _ = step(variables, opt_state, next(batches), key)
    return variables


def increases(
    options: training.Options, corpus: corpus_lib.Corpus, seed: int
) -> dict[tuple[str, int], float]:
    """The increase of the loss by each method and width, and of "float32" the loss."""
    variables = trained(options, corpus, seed)
    batches = corpus.batches(options.batch, options.length, seed + 1000)
    samples = [next(batches)[:, :-1] for _ in range(CALIBRATION_BATCHES)]
    validation = corpus.validation_batches(
        options.validation_batches, training.VALIDATION_BATCH, options.length
    )

    def model_of(cfg: config.DotGeneral | None) -> Any:
        return Transformer(
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            length=options.length,
            cfg=cfg,
        )

    def loss(model: Any, variables: Any) -> float:
        evaluation = jax.jit(functools.partial(demo_training.loss_fn, model))
        return float(np.mean([evaluation(variables, batch) for batch in validation]))

    exact = loss(model_of(None), variables)
    found = {("float32", 32): exact}
    statistics = None
    for bits in BITS:
        for name, cfg in configs(bits).items():
            model, given = model_of(cfg), variables
            if cfg.fwd.rhs.rounding is not None:
                if statistics is None:
                    calibrated = calibrate_in_float(model, variables, samples)
                    statistics = calibrated["aqt_stats"]
                given = {**variables, "aqt_stats": statistics}
            served = convert(model, given, samples[0])
            found[name, bits] = loss(model, served) - exact
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, rounds, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.rounding")
    parser.add_argument(
        "--seeds", nargs="+", type=arguments_lib.natural, default=[0, 1, 2]
    )
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args(arguments)
    options = training.QUICK
    if not asked.quick:
        options = training.Options(layers=3, width=128, validation_batches=16)
    corpus = corpus_lib.standard_library(options.length)
    runs = [increases(options, corpus, seed) for seed in asked.seeds]
    exact = np.mean([run["float32", 32] for run in runs])
    print(f"float32: {exact:.4f}; seeds {', '.join(map(str, asked.seeds))}\n")
    print("| | " + " | ".join(f"{bits} bits" for bits in BITS) + " |")
    print("| --- |" + " ---: |" * len(BITS))
    for name in configs(BITS[0]):
        cells = []
        for bits in BITS:
            values = [run[name, bits] for run in runs]
            spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):+.4f}{spread}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

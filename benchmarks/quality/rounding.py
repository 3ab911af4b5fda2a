"""Round the weights of a trained transformer by several methods, and compare losses.

    python -m benchmarks.quality.rounding [--seeds N ...] [--models FOLDER] [--quick]

Trains the demo's transformer in float32 for each seed, quantizes the kernels of all
layers to an affine grid with a scale for each 128 inputs, and prints the increase of
the validation loss, in nats per byte.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.flax import calibrate_in_float, convert
from aqtlite_demo import corpus as corpus_lib
from benchmarks.quality import after_training, training

BITS = (4, 3)
CALIBRATION_BATCHES = 12
"""Batches of the training text from which statistics are gathered."""


def configs(bits: int) -> dict[str, config.DotGeneral]:
    """The configs to compare, by the name of their method."""
    nearest: dict[str, Any] = {"fwd.rhs.rounding": None}
    search: dict[str, Any] = {"fwd.rhs.calibration": calibration.MseSearch()}
    own_order = {"fwd.rhs.rounding": config.Gptq(act_order=False)}
    symmetric = {"fwd.rhs.numerics": numerics.IntSymmetric(bits=bits)}
    changes: dict[str, dict[str, Any]] = {
        "nearest": nearest,
        "MseSearch": nearest | search,
        "GPTQ": {},
        "GPTQ and MseSearch, own order": search | own_order,
        "GPTQ and MseSearch": search,
        "GPTQ and MseSearch, symmetric": search | symmetric,
    }
    gptq = config.gptq(bits)
    return {name: config.update(gptq, one) for name, one in changes.items()}


def increases(
    options: training.Options,
    corpus: corpus_lib.Corpus,
    seed: int,
    models: pathlib.Path | None = None,
) -> dict[tuple[str, int], float]:
    """The increase of the loss by each method and width, and of "float32" the loss."""
    variables = after_training.trained(options, corpus, seed, models)
    batches = corpus.batches(options.batch, options.length, seed + 1000)
    samples = [next(batches)[:, :-1] for _ in range(CALIBRATION_BATCHES)]
    loss = after_training.validation_loss(options, corpus)
    exact = loss(after_training.transformer(options), variables)
    found = {("float32", 32): exact}
    statistics = None
    for bits in BITS:
        for name, cfg in configs(bits).items():
            model, given = after_training.transformer(options, cfg=cfg), variables
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
    asked = after_training.parser(__file__, __doc__).parse_args(arguments)
    options, corpus = after_training.sizes(asked)
    runs = [increases(options, corpus, seed, asked.models) for seed in asked.seeds]
    exact = np.mean([run["float32", 32] for run in runs])
    print(f"float32: {exact:.4f}; seeds {', '.join(map(str, asked.seeds))}\n")
    print("| | " + " | ".join(f"{bits} bits" for bits in BITS) + " |")
    print("| --- |" + " ---: |" * len(BITS))
    for name in configs(BITS[0]):
        cells = [
            after_training.cell([run[name, bits] for run in runs]) for bits in BITS
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

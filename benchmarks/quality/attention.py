"""Train the demo's model with its attention in float and quantized in two ways.

    python -m benchmarks.quality.attention [--seeds N ...] [--steps N] [--quick]

Each seed trains four models side by side on equal batches: float32; int8 projections
with attention in float; attention in int8, too, with a scale of each channel of the
values over all positions, as `aqtlite.einsum` has it; and with a scale of each position
(`config.for_values`), as `AqtEinsum` and rules have it. Losses are of held-out text;
times are medians, relative to float32's. The channels' scales let positions see later
ones, in training and in the validation loss.
"""

import argparse
import functools
import statistics

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from aqtlite_demo import corpus, training
from aqtlite_demo.model import Transformer
from benchmarks.harness import arguments

FLOAT32 = "float32"


def models(**sizes: int) -> dict[str, Transformer]:
    """The models by name."""
    cfg = config.fully_quantized()
    per_channel = functools.partial(aqtlite.einsum, cfg=cfg)
    projections = AqtDotGeneral(cfg)
    return {
        FLOAT32: Transformer(**sizes),
        "int8, attention in float": Transformer(**sizes, dot_general=projections),
        "int8, a scale per channel": Transformer(
            **sizes, dot_general=projections, einsum=per_channel
        ),
        "int8, a scale per position": Transformer(**sizes, cfg=cfg),
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=arguments.natural, default=[0, 1, 2])
    parser.add_argument("--steps", type=arguments.positive, default=400)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    sizes = {"layers": 4, "width": 192, "heads": 4, "length": 128}
    batch, windows, steps = 8, 16, options.steps
    if options.quick:
        sizes = {"layers": 1, "width": 32, "heads": 2, "length": 16}
        batch, windows, steps = 4, 2, 12
    text = corpus.standard_library(sizes["length"])
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in options.seeds:
        runs = training.train_side_by_side(
            models(**sizes),
            text.batches(batch, sizes["length"], seed),
            text.validation_batches(windows, 64, sizes["length"]),
            steps=steps,
            lr=3e-3,
            seed=seed,
            on_step=lambda step, runs: None,
        )
        float_time = runs[FLOAT32].step_seconds
        for name, run in runs.items():
            result = run.validation_loss, run.step_seconds / float_time
            found.setdefault(name, []).append(result)
            print(
                f"seed {seed}  {name}  {result[0]:.4f}  {result[1]:.2f} x", flush=True
            )
    print("| model | validation loss, nats per byte | step |\n| --- | --- | --- |")
    for name, results in found.items():
        losses = ", ".join(f"{loss:.4f}" for loss, _ in results)
        time = statistics.median(time for _, time in results)
        print(f"| {name} | {losses} | {time:.2f} x |")


if __name__ == "__main__":
    main()

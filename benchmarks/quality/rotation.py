"""Quantize the activations of a trained transformer, rotated or not, and compare.

    python -m benchmarks.quality.rotation [--seeds N ...] [--models FOLDER] [--quick]

Trains the demo's transformer in float32 for each seed, quantizes the inputs of all
projections per token and their weights per channel, after training, and prints the
increase of the validation loss, in nats per byte. Outliers are two channels of each
input made larger, and compensated exactly in the weights.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config, numerics
from aqtlite_demo import corpus as corpus_lib
from benchmarks.quality import after_training, training

WIDTHS: dict[str, tuple[int | None, int]] = {
    "W16A8": (None, 8),
    "W8A8": (8, 8),
    "W4A8": (4, 8),
    "W16A4": (None, 4),
    "W4A4": (4, 4),
}
"""Bits of weights and of activations; None leaves the weights in float."""

OUTLIERS = (1, 20)
"""Factors of the outliers; 1 leaves the inputs as trained."""


def cfg_of(weights: int | None, activations: int, is_rotated: bool) -> Any:
    """The config of a cell of the table."""

    def tensor(bits: int | None) -> config.Tensor:
        if bits is None:
            return config.Tensor()
        return config.Tensor(numerics=numerics.IntSymmetric(bits=bits))

    rotation = config.Hadamard() if is_rotated else None
    fwd = config.DotGeneralRaw(
        lhs=tensor(activations), rhs=tensor(weights), rotation=rotation
    )
    return config.DotGeneral(fwd=fwd)


def with_outliers(cfg: config.DotGeneral | None, factor: float) -> Callable[..., Any]:
    """A `lax.dot_general` of operands with two larger channels."""
    dot_general = aqtlite.make_dot_general(cfg)

    def contract(x: Any, w: Any, dims: Any, **kwargs: Any) -> Any:
        (x_axes, w_axes), _ = dims
        sizes = [x.shape[axis] for axis in x_axes]
        scales = np.ones(sizes, np.float32)
        scales.flat[[scales.size // 5, scales.size // 2]] = factor

        def laid_out(scales: Any, ndim: int, axes: Sequence[int]) -> Any:
            others = [axis for axis in range(ndim) if axis not in axes]
            return jnp.expand_dims(scales, others)

        x = x * laid_out(scales, x.ndim, x_axes)
        w = w / laid_out(scales, w.ndim, w_axes)
        return dot_general(x, w, dims, **kwargs)

    return contract


def increases(
    options: training.Options,
    corpus: corpus_lib.Corpus,
    seed: int,
    models: pathlib.Path | None = None,
) -> dict[tuple[str, float, bool], float]:
    """The increase of the loss by widths, outliers, rotation; of "float", the loss."""
    variables = after_training.trained(options, corpus, seed, models)
    loss_of = after_training.validation_loss(options, corpus)

    def loss(cfg: config.DotGeneral | None, factor: float) -> float:
        dot_general = with_outliers(cfg, factor)
        model = after_training.transformer(options, dot_general=dot_general)
        return loss_of(model, variables)

    exact = loss(None, 1)
    found = {("float", 1.0, False): exact}
    for name, (weights, activations) in WIDTHS.items():
        for factor in OUTLIERS:
            for is_rotated in (False, True):
                cfg = cfg_of(weights, activations, is_rotated)
                found[name, factor, is_rotated] = loss(cfg, factor) - exact
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, quantizes, and prints a table."""
    asked = after_training.parser(__file__, __doc__).parse_args(arguments)
    options, corpus = after_training.sizes(asked)
    runs = [increases(options, corpus, seed, asked.models) for seed in asked.seeds]
    exact = np.mean([run["float", 1.0, False] for run in runs])
    print(f"float32: {exact:.4f}; seeds {', '.join(map(str, asked.seeds))}\n")
    print("| | " + " | ".join(WIDTHS) + " |")
    print("| --- |" + " ---: |" * len(WIDTHS))
    for factor in OUTLIERS:
        for is_rotated in (False, True):
            cells = [
                after_training.cell([run[name, factor, is_rotated] for run in runs])
                for name in WIDTHS
            ]
            what = "as trained" if factor == 1 else f"outliers x {factor}"
            name = f"{what}, rotated" if is_rotated else what
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

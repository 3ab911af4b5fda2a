"""Choose bits for each layer of a trained transformer, and compare with uniform bits.

    python -m benchmarks.quality.bits [--seeds N ...] [--models FOLDER]
        [--rounding {nearest,gptq}] [--plot FILE.png] [--quick]

Trains the demo's transformer in float32 for each seed, chooses configs for its weights
on batches of the training text, and prints the increase of the loss on held-out text,
in nats per byte: of uniform candidates, and of what is chosen for as many bytes.
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import aqtlite
from aqtlite import config
from aqtlite.flax import (
    QuantizedModel,
    calibrate_in_float,
    convert,
    quantize_model,
)
from aqtlite_demo import corpus as corpus_lib
from benchmarks.quality import after_training, training

BATCHES = 8
"""Batches of the training text that the choice is measured with."""


def nearest() -> dict[str, config.DotGeneral]:
    """Configs of weights alone, rounded to nearest, by name."""
    found = {}
    for bits, size in ((2, 32), (2, 16), (4, None), (4, 32), (4, 16), (8, None)):
        cfg, name = config.weight_only(bits), f"{bits} bits"
        if size is not None:
            blocks = config.Blocks(size=size, fit=True)
            cfg = config.update(cfg, {"fwd.rhs.blocks": blocks})
            name += f", blocks of {size}"
        found[name] = cfg
    return found


def gptq() -> dict[str, config.DotGeneral]:
    """Configs of weights alone, those of 2 and 4 bits rounded by GPTQ, by name."""
    found = {"8 bits": config.weight_only(8)}
    for bits, size in ((2, 32), (2, 16), (4, 128), (4, 32), (4, 16)):
        found[f"{bits} bits, GPTQ, blocks of {size}"] = config.gptq(bits, size)
    return found


CANDIDATES = {"nearest": nearest, "gptq": gptq}
"""Functions that return the configs to choose from, by the rounding of few bits."""


def divergence(logits: jax.Array, tokens: jax.Array, exact: jax.Array) -> jax.Array:
    """Mean Kullback-Leibler divergence from the float model, in nats per byte.

    Never negative, while a quantized model may have a smaller loss by luck.
    """
    del tokens
    log_probs, exact = jax.nn.log_softmax(logits), jax.nn.log_softmax(exact)
    return optax.losses.kl_divergence_with_log_targets(log_probs, exact).mean()


Figures = dict[str, tuple[int, float, int, float]]
"""By candidate: bytes and increase of the loss, and those of the choice."""


def compared(
    options: training.Options,
    corpus: corpus_lib.Corpus,
    seed: int,
    candidates: Mapping[str, config.DotGeneral],
    models: pathlib.Path | None = None,
) -> tuple[float, Figures]:
    """Trains, chooses, and measures on held-out text.

    Args:
        options: sizes of the model and its training.
        corpus: text.
        seed: seed of the training.
        candidates: the configs to choose from.
        models: folder of models that are trained already, which gets this one.

    Returns:
        The loss in float, and the figures of each candidate beside those of what is
        chosen within as many bytes.
    """
    variables = after_training.trained(options, corpus, seed, models)
    model = after_training.transformer(options)
    batches = corpus.batches(options.batch, options.length, seed + 1000)
    in_float = jax.jit(functools.partial(model.apply, variables))
    tokens = [next(batches)[:, :-1] for _ in range(BATCHES)]
    held = [(x, in_float(x)) for x in tokens]
    loss_of = after_training.validation_loss(options, corpus)
    found = aqtlite.choose_bits(
        model,
        variables,
        held,
        candidates=candidates,
        budget=1.0,
        loss=divergence,
        num_inputs=1,
    )
    exact = loss_of(model, variables)

    @functools.cache
    def increase(rules: tuple[aqtlite.Rule, ...]) -> float:
        quantized = quantize_model(model, rules)
        return loss_of(quantized, served(quantized, variables, tokens)) - exact

    figures = {}
    for uniform in found.uniform[1:]:
        # As choose_bits chooses for this budget.
        measured = (*found.curve, *found.uniform)
        within = [one for one in measured if one.nbytes <= uniform.nbytes]
        chosen = min(within, key=lambda one: one.loss)
        figures[uniform.name] = (
            uniform.nbytes,
            increase(uniform.rules),
            chosen.nbytes,
            increase(chosen.rules),
        )
    return exact, figures


def served(model: QuantizedModel, variables: Any, tokens: Sequence[jax.Array]) -> Any:
    """The variables of a converted model, with statistics of tokens if it needs any."""
    cfgs = [rule.cfg for rule in model.rules if rule.cfg is not None]
    if not cfgs:
        return variables
    if any(cfg.fwd.rhs.rounding is not None for cfg in cfgs):
        variables = calibrate_in_float(model, variables, tokens)
    return convert(model, variables, tokens[0])


def table(runs: Sequence[Figures]) -> str:
    """The means over runs as a table in Markdown, by bytes."""
    rows = ["| all weights | bytes | increase | chosen: bytes | increase |"]
    rows.append("| --- " + "| ---: " * 4 + "|")
    names = sorted(runs[0], key=lambda name: runs[0][name][0])
    for name in names:
        uniform, by_uniform, chosen, by_chosen = np.mean(
            [run[name] for run in runs], axis=0
        )
        rows.append(
            f"| {name} | {uniform:,.0f} | {by_uniform:+.4f} | {chosen:,.0f} | "
            f"{by_chosen:+.4f} |"
        )
    return "\n".join(rows)


def draw(runs: Sequence[Figures], path: pathlib.Path) -> None:
    """Draws the means over runs: the increase of the loss by bytes."""
    from matplotlib.figure import Figure

    means = {name: np.mean([run[name] for run in runs], axis=0) for name in runs[0]}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    chosen = sorted({(x[2], x[3]) for x in means.values()})
    axes.plot(*zip(*chosen, strict=True), "o-", color="C0", label="chosen")
    for name, (nbytes, increase, *_) in means.items():
        axes.plot(nbytes, increase, "s", color="C1")
        place = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(name, (nbytes, increase), **place)
    axes.plot([], [], "s", color="C1", label="uniform")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.set_xlabel("bytes")
    axes.set_ylabel("increase of the validation loss, nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, chooses, and prints a table."""
    parser = after_training.parser(__file__, __doc__)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    parser.add_argument("--rounding", choices=CANDIDATES, default="nearest")
    asked = parser.parse_args(arguments)
    options, corpus = after_training.sizes(asked)
    candidates = CANDIDATES[asked.rounding]()
    found = [
        compared(options, corpus, seed, candidates, asked.models)
        for seed in asked.seeds
    ]
    runs = [figures for _, figures in found]
    exact = np.mean([one for one, _ in found])
    print(f"float32: {exact:.4f}; seeds {', '.join(map(str, asked.seeds))}\n")
    print(table(runs))
    if asked.plot is not None:
        draw(runs, asked.plot)


if __name__ == "__main__":
    main()

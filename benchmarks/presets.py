"""Every preset on this machine: loss, times, bytes, and whether it serves as trained.

    python -m benchmarks.presets [--quick] [--only NAME ...] [--page FILE.md]

A transformer of the demo is trained in float32 and with each preset, from the same
seeds and on the same text. Presets that need statistics quantize the float models after
training, their attention left in float. All train and serve by turns, step by step, and
times are medians of ratios to float32 in the same round. The columns:

- loss: validation loss of the served model, less float32's, in nats per byte: the mean
  over seeds, and the lowest and highest;
- step, token: time of a training step, and of a generated token with a KV cache;
- bytes: of a checkpoint of the served variables;
- memory: peak of the compiled training step, arguments included;
- served: whether served logits have the bits of the trained model. GPTQ rounds weights
  when they are converted, so that they differ from those before.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console

from aqtlite import config
from aqtlite.allocation import plots
from aqtlite.flax import AqtDotGeneral, calibrate_in_float, convert
from aqtlite.qtensor import codes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite_demo import corpus as corpus_lib
from aqtlite_demo import generate, training
from aqtlite_demo.model import Transformer
from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness import pages, tables

FLOAT = "unquantized()"

CONFIGS: dict[str, Callable[[], config.DotGeneral]] = {
    **{f"{name}()": one.make for name, one in config.presets().items()},
    "fully_quantized(fwd_bits=4)": lambda: config.fully_quantized(fwd_bits=4),
    "weight_only(4)": lambda: config.weight_only(4),
    "qat(4)": lambda: config.qat(4),
    "lsq(8)": lambda: config.lsq(8),
    "fp8(per_tensor=True)": lambda: config.fp8(per_tensor=True),
    "nvfp4(per_tensor=True)": lambda: config.nvfp4(per_tensor=True),
}
"""The presets with their defaults, and those of other arguments that users choose."""

AFTER_TRAINING = {"gptq()", "smoothquant()", "static_int8()"}
"""Those that quantize models trained in float."""

HEAD = ("preset", "loss", "step", "token", "bytes", "memory", "served")


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of the comparison."""

    layers: int = 2
    width: int = 64
    length: int = 64
    batch: int = 16
    steps: int = 400
    seeds: int = 3
    lr: float = 3e-3
    validation_batches: int = 8
    tokens: int = 48


QUICK = Options(layers=1, width=32, length=16, batch=8, steps=12, tokens=8)


@dataclasses.dataclass
class Subject:
    """A preset with its model and what is measured of it."""

    name: str
    model: Transformer
    init: Callable[..., Any]
    """The compiled `init` and `apply` of the model."""

    apply: Callable[..., Any]
    losses: list[float] = dataclasses.field(default_factory=list)
    """Validation loss as served, for each seed."""

    step: Callable[..., Any] | None = None
    """The compiled training step; None if it is not trained."""

    peak: int = 0
    steps: list[float] = dataclasses.field(default_factory=list)
    """Times of training steps, in seconds."""

    tokens: list[float] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    is_equal: bool = True
    """Whether all served logits have the bits of trained ones."""


def subjects(names: Sequence[str], options: Options) -> list[Subject]:
    """The presets of these names and float32, with their models."""
    sizes = (options.layers, options.width, 4, options.length)
    found = []
    for name in dict.fromkeys([FLOAT, *names]):
        cfg = CONFIGS[name]()
        if name in AFTER_TRAINING:
            model = Transformer(*sizes, dot_general=AqtDotGeneral(cfg))
        else:
            model = Transformer(*sizes, cfg=cfg if cfg.is_quantized else None)
        found.append(Subject(name, model, jax.jit(model.init), jax.jit(model.apply)))
    return found


def compile_steps(several: Sequence[Subject], options: Options, batch: Any) -> None:
    """Compiles the training steps, and reads their memory."""
    tx = training.optimizer(options.lr, options.steps)
    for one in several:
        if one.name in AFTER_TRAINING:
            continue
        variables = jax.eval_shape(one.model.init, jax.random.key(0), batch[:, :-1])
        step = training.make_step(one.model, tx)
        state = jax.eval_shape(tx.init, variables)
        compiled = step.lower(variables, state, batch).compile()
        memory = compiled.memory_analysis()
        one.step = compiled
        one.peak = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )


def train(
    several: Sequence[Subject], options: Options, corpus: Any, seed: int
) -> dict[str, Any]:
    """Trains all models by turns; returns their variables."""
    tx = training.optimizer(options.lr, options.steps)
    batches = corpus.batches(options.batch, options.length, seed)
    trained = [one for one in several if one.step is not None]
    state = {}
    tokens = jnp.zeros((options.batch, options.length), jnp.int32)
    for one in trained:
        variables = one.init(jax.random.key(seed), tokens)
        state[one.name] = variables, tx.init(variables)
    for number, batch in enumerate(itertools.islice(batches, options.steps)):
        for one in trained if number % 2 else reversed(trained):
            begin = time.perf_counter()
            variables, opt_state, loss = one.step(*state[one.name], jnp.asarray(batch))
            jax.block_until_ready((variables, loss))
            one.steps.append(time.perf_counter() - begin)
            state[one.name] = variables, opt_state
    return {name: variables for name, (variables, _) in state.items()}


def serve(
    several: Sequence[Subject],
    variables: Mapping[str, Any],
    samples: Sequence[Any],
    validation: Sequence[Any],
) -> dict[str, Any]:
    """Converts all models, measures their losses, and returns serving variables."""
    served = {}
    for one in several:
        given = variables.get(one.name, variables[FLOAT])
        if one.name in AFTER_TRAINING:
            given = calibrate_in_float(one.model, given, samples)
        tokens = validation[0][:, :-1]
        is_float = one.name == FLOAT
        serving = given if is_float else convert(one.model, given, tokens)
        trained, converted = (
            np.asarray(one.apply(x, tokens)) for x in (given, serving)
        )
        one.is_equal &= trained.tobytes() == converted.tobytes()
        one.losses.append(
            statistics.mean(_loss(one.apply(serving, x[:, :-1]), x) for x in validation)
        )
        leaves = jax.tree.leaves(serving, is_leaf=lambda x: isinstance(x, QTensor))
        one.nbytes = sum(map(codes.stored_bytes, leaves))
        served[one.name] = serving
    return served


def _loss(logits: jax.Array, batch: Any) -> float:
    labels = jnp.asarray(batch[:, 1:])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return float(losses.mean())


def generate_by_turns(
    several: Sequence[Subject], served: Mapping[str, Any], options: Options
) -> None:
    """Measures the time of a token of all models, by turns."""
    state = {}
    for one in several:
        model = one.model.clone(decode=True)
        step = generate.decode_step(model, served[one.name])
        state[one.name] = step, generate.init_cache(model), jnp.zeros((1, 1), jnp.int32)
    key = jax.random.key(0)
    for _ in range(options.tokens):
        for one in several:
            step, cache, token = state[one.name]
            begin = time.perf_counter()
            cache, token = jax.block_until_ready(step(cache, token, key))
            one.tokens.append(time.perf_counter() - begin)
            state[one.name] = step, cache, token


def measure(names: Sequence[str], options: Options) -> list[Subject]:
    """Measures presets by name, and float32."""
    corpus = corpus_lib.standard_library(options.length)
    several = subjects(names, options)
    sizes = (options.validation_batches, options.batch, options.length)
    validation = corpus.validation_batches(*sizes)
    samples = [
        batch[:, :-1]
        for batch in itertools.islice(corpus.batches(*sizes[1:], seed=99), 4)
    ]
    compile_steps(several, options, jnp.asarray(validation[0]))
    served: dict[str, Any] = {}
    for seed in range(options.seeds):
        variables = train(several, options, corpus, seed)
        served = serve(several, variables, samples, validation)
    generate_by_turns(several, served, options)
    return several


def _ratio(times: Sequence[float], of_float: Sequence[float]) -> float:
    """The median of ratios in the same round, without the first."""
    pairs = list(zip(times, of_float, strict=True))
    return statistics.median(one / other for one, other in pairs[1:])


@dataclasses.dataclass(frozen=True)
class Row:
    """What the table says about a preset, relative to float32."""

    name: str
    loss: tuple[float, float, float]
    """Mean, lowest and highest difference."""

    step: float | None
    token: float
    nbytes: float
    memory: float | None
    is_equal: bool

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        mean, low, high = self.loss
        step = "after training" if self.step is None else f"{self.step:.2f} x"
        memory = "" if self.memory is None else f"{self.memory:.2f} x"
        return (
            f"`{self.name}`",
            f"{mean:+.4f} ({low:+.4f} to {high:+.4f})",
            step,
            f"{self.token:.2f} x",
            f"{self.nbytes:.2f} x",
            memory,
            "equal" if self.is_equal else "differs",
        )


def rows(several: Sequence[Subject]) -> list[Row]:
    """Returns what was measured, relative to float32, sorted by loss."""
    (exact,) = (one for one in several if one.name == FLOAT)
    found = []
    for one in several:
        if one is exact:
            continue
        pairs = zip(one.losses, exact.losses, strict=True)
        differences = [x - y for x, y in pairs]
        is_trained = one.step is not None
        row = Row(
            one.name,
            (statistics.mean(differences), min(differences), max(differences)),
            _ratio(one.steps, exact.steps) if is_trained else None,
            _ratio(one.tokens, exact.tokens),
            one.nbytes / exact.nbytes,
            one.peak / exact.peak if is_trained else None,
            one.is_equal,
        )
        found.append(row)
    return sorted(found, key=lambda row: row.loss[0])


def markdown(found: Sequence[Row]) -> str:
    """Formats the table as Markdown."""
    lines = [
        HEAD,
        ("---", "---", *["---:"] * 4, "---"),
        *(row.cells() for row in found),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(found: Sequence[Row], folder: pathlib.Path) -> None:
    """Draws the loss over the time of a step, and over bytes."""
    for name, label, value in (
        ("time", "time of a training step, float32 = 1", lambda row: row.step),
        ("bytes", "bytes of the served variables, float32 = 1", lambda row: row.nbytes),
    ):
        points = {
            row.name: (value(row), row.loss[0])
            for row in found
            if value(row) is not None
        }
        file = folder / f"presets_{name}.png"
        plots.scatter(points, (label, "loss above float32, nats per byte"), file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it into a page with its plots."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.presets", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a check that all runs")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=CONFIGS, default=list(CONFIGS)
    )
    parser.add_argument("--steps", type=arguments_lib.positive)
    parser.add_argument("--seeds", type=arguments_lib.positive)
    parser.add_argument(
        "--page",
        type=pathlib.Path,
        metavar="FILE.md",
        help="page that gets the table, between its markers, and plots beside it",
    )
    asked = parser.parse_args(arguments)
    options = Options()
    if asked.quick:
        options = QUICK
        # Compiled in a quarter of the time, to slower code; read at the first program.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    changes = {"steps": asked.steps, "seeds": asked.seeds}
    given = {name: value for name, value in changes.items() if value is not None}
    options = dataclasses.replace(options, **given)
    found = rows(measure(asked.only, options))
    console: rich.console.Console = tables.console()
    console.print(markdown(found), markup=False, soft_wrap=True)
    if asked.page is not None:
        pages.write(asked.page, {"presets": markdown(found)})
        plot(found, asked.page.parent)


if __name__ == "__main__":
    main()

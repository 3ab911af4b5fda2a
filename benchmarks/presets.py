"""Every preset on this machine: loss, times, bytes, and whether it serves as trained.

    python -m benchmarks.presets [--quick] [--only NAME ...] [--keep ROWS.jsonl]
        [--page FILE.md]

A transformer of the demo is trained in float32 and with each preset, from the same
seeds and on the same text. Presets that need statistics quantize the float models after
training; they leave attention in float, and so do those of weights alone. Each preset
is compiled once for all seeds, and its row printed as soon as it is measured; with
`--keep`, rows are also written to a file, and those that are in it are not measured
again. The columns:

- loss: validation loss of the served model, less float32's, in nats per byte: the mean
  over seeds, and the lowest and highest;
- step, token: processor time of a training step, and of a generated token with a KV
  cache, which other programs on the machine do not change: medians of ratios to
  float32's, by turns;
- bytes: of a checkpoint of the served variables;
- memory: peak of the compiled training step, arguments included;
- served: whether served logits have the bits of the trained model. GPTQ rounds weights
  when they are converted, so that they differ from those before.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, calibrate_in_float, convert
from aqtlite.output import plots
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
    steps: int = 200
    seeds: int = 3
    lr: float = 3e-3
    validation_batches: int = 8
    rounds: int = 30
    """Number of timed steps, and of timed tokens."""


QUICK = Options(layers=1, width=32, length=16, batch=8, steps=12, rounds=4)


@dataclasses.dataclass(frozen=True)
class Data:
    """Texts that all presets share."""

    corpus: Any
    validation: Sequence[Any]
    samples: Sequence[Any]
    """Batches for calibration."""

    @classmethod
    def of(cls, options: Options) -> "Data":
        """Reads the corpus."""
        corpus = corpus_lib.standard_library(options.length)
        sizes = options.batch, options.length
        drawn = itertools.islice(corpus.batches(*sizes, seed=99), 4)
        return cls(
            corpus,
            corpus.validation_batches(options.validation_batches, *sizes),
            [batch[:, :-1] for batch in drawn],
        )


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its programs, compiled once for all seeds."""

    name: str
    model: Transformer
    init: Callable[..., Any]
    apply: Callable[..., Any]
    step: Callable[..., Any] | None
    """The compiled training step; None if it is quantized after training."""

    peak: int
    """Bytes of the memory of the step."""

    @classmethod
    def of(cls, name: str, options: Options, data: Data) -> "Subject":
        """Builds the model of a preset, and compiles its training step."""
        sizes = (options.layers, options.width, 4, options.length)
        cfg = CONFIGS[name]()
        if name in AFTER_TRAINING:
            model = Transformer(*sizes, dot_general=AqtDotGeneral(cfg))
            return cls(name, model, jax.jit(model.init), jax.jit(model.apply), None, 0)
        if cfg.is_quantized and not cfg.fwd.lhs.is_quantized:
            model = Transformer(*sizes, dot_general=AqtDotGeneral(cfg))
        else:
            model = Transformer(*sizes, cfg=cfg if cfg.is_quantized else None)
        batch = jnp.asarray(data.validation[0])
        tx = training.optimizer(options.lr, options.steps)
        variables = jax.eval_shape(model.init, jax.random.key(0), batch[:, :-1])
        state = jax.eval_shape(tx.init, variables)
        step = training.make_step(model, tx).lower(variables, state, batch).compile()
        memory = step.memory_analysis()
        peak = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        return cls(name, model, jax.jit(model.init), jax.jit(model.apply), step, peak)


@dataclasses.dataclass(frozen=True)
class Served:
    """The served models of all seeds."""

    losses: tuple[float, ...]
    variables: Any
    """Those of the last seed."""

    nbytes: int
    is_equal: bool
    """Whether all served logits have the bits of trained ones."""


def _steps(
    one: Subject, options: Options, data: Data, seed: int
) -> Iterator[tuple[Any, Any]]:
    """Yields the variables and the loss after each training step."""
    assert one.step is not None
    tx = training.optimizer(options.lr, options.steps)
    tokens = data.validation[0][:, :-1]
    variables = one.init(jax.random.key(seed), tokens)
    state = tx.init(variables)
    for batch in data.corpus.batches(options.batch, options.length, seed):
        variables, state, loss = one.step(variables, state, jnp.asarray(batch))
        yield variables, loss


def train(one: Subject, options: Options, data: Data) -> list[Any]:
    """Trains a model from each seed; returns the variables."""
    found = []
    for seed in range(options.seeds):
        steps = _steps(one, options, data, seed)
        variables, _ = next(itertools.islice(steps, options.steps - 1, None))
        found.append(variables)
    return found


def serve(one: Subject, trained: Sequence[Any], data: Data) -> Served:
    """Converts the models of all seeds, and measures their losses."""
    tokens = data.validation[0][:, :-1]
    losses, is_equal, nbytes, serving = [], True, 0, None
    for given in trained:
        if one.name in AFTER_TRAINING:
            given = calibrate_in_float(one.model, given, data.samples)
        is_float = one.name == FLOAT
        serving = given if is_float else convert(one.model, given, tokens)
        before, after = (np.asarray(one.apply(x, tokens)) for x in (given, serving))
        is_equal &= before.tobytes() == after.tobytes()
        losses.append(
            statistics.mean(
                _loss(one.apply(serving, x[:, :-1]), x) for x in data.validation
            )
        )
        leaves = jax.tree.leaves(serving, is_leaf=lambda x: isinstance(x, QTensor))
        nbytes = sum(map(codes.stored_bytes, leaves))
    return Served(tuple(losses), serving, nbytes, is_equal)


def _loss(logits: jax.Array, batch: Any) -> float:
    labels = jnp.asarray(batch[:, 1:])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return float(losses.mean())


def _tokens(one: Subject, variables: Any) -> Iterator[Any]:
    """Yields generated tokens."""
    model = one.model.clone(decode=True)
    step = generate.decode_step(model, variables)
    cache, token = generate.init_cache(model), jnp.zeros((1, 1), jnp.int32)
    key = jax.random.key(0)
    while True:
        cache, token = step(cache, token, key)
        yield token


def ratio(one: Iterator[Any], other: Iterator[Any], rounds: int) -> float:
    """The median ratio of the processor times of two iterators' items, by turns.

    Args:
        one: yields arrays, each computed when it is asked for.
        other: as `one`.
        rounds: number of timed items, after a first one of each.
    """
    jax.block_until_ready((next(one), next(other)))
    ratios = []
    for number in range(rounds):
        seconds = {}
        for which in (one, other) if number % 2 else (other, one):
            begin = time.process_time()
            jax.block_until_ready(next(which))
            seconds[which] = time.process_time() - begin
        ratios.append(seconds[one] / seconds[other])
    return statistics.median(ratios)


@dataclasses.dataclass(frozen=True)
class Row:
    """What the table says about a preset, relative to float32."""

    name: str
    losses: tuple[float, ...]
    """Differences of the losses of all seeds."""

    step: float | None
    token: float
    nbytes: float
    memory: float | None
    is_equal: bool

    @property
    def loss(self) -> float:
        """The mean difference."""
        return statistics.mean(self.losses)

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        losses = (
            f"{self.loss:+.4f} ({min(self.losses):+.4f} to {max(self.losses):+.4f})"
        )
        return (
            f"`{self.name}`",
            losses,
            "after training" if self.step is None else f"{self.step:.2f} x",
            f"{self.token:.2f} x",
            f"{self.nbytes:.2f} x",
            "" if self.memory is None else f"{self.memory:.2f} x",
            "equal" if self.is_equal else "differs",
        )


def measure(names: Sequence[str], options: Options) -> Iterator[Row]:
    """Yields the row of each preset by name, as soon as it is measured."""
    names = [name for name in names if name != FLOAT]
    if not names:
        return
    data = Data.of(options)
    exact = Subject.of(FLOAT, options, data)
    in_float = train(exact, options, data)
    of_float = serve(exact, in_float, data)
    for name in names:
        one = Subject.of(name, options, data)
        trained = in_float if one.step is None else train(one, options, data)
        served = serve(one, trained, data)
        step = None
        if one.step is not None:
            both = [_steps(x, options, data, 0) for x in (one, exact)]
            step = ratio(*both, options.rounds)
        pairs = zip(served.losses, of_float.losses, strict=True)
        yield Row(
            name,
            tuple(x - y for x, y in pairs),
            step,
            ratio(
                _tokens(one, served.variables),
                _tokens(exact, of_float.variables),
                options.rounds,
            ),
            served.nbytes / of_float.nbytes,
            None if one.step is None else one.peak / exact.peak,
            served.is_equal,
        )


def kept(path: pathlib.Path | None, options: Options) -> list[Row]:
    """Returns the rows in a file that were measured with the same sizes."""
    if path is None or not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    wanted = dataclasses.asdict(options)
    return [
        Row(**{**line["row"], "losses": tuple(line["row"]["losses"])})
        for line in lines
        if line["options"] == wanted
    ]


def keep(path: pathlib.Path, options: Options, row: Row) -> None:
    """Adds a row to a file."""
    line = {"options": dataclasses.asdict(options), "row": dataclasses.asdict(row)}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def markdown(found: Sequence[Row]) -> str:
    """Formats the table as Markdown, sorted by loss."""
    lines = [
        HEAD,
        ("---", "---", *["---:"] * 4, "---"),
        *(row.cells() for row in sorted(found, key=lambda row: row.loss)),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(found: Sequence[Row], folder: pathlib.Path) -> None:
    """Draws the loss over the time of a step, and over bytes."""
    for name, label, value in (
        ("time", "time of a training step, float32 = 1", lambda row: row.step),
        ("bytes", "bytes of the served variables, float32 = 1", lambda row: row.nbytes),
    ):
        points = {
            row.name: (value(row), row.loss) for row in found if value(row) is not None
        }
        file = folder / f"presets_{name}.png"
        plots.scatter(points, (label, "loss above float32, nats per byte"), 1e-4, file)


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
    parser.add_argument(
        "--keep",
        type=pathlib.Path,
        metavar="ROWS.jsonl",
        help="file of rows, to which they are added, and from which they are taken",
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
    console: rich.console.Console = tables.console()
    found = [x for x in kept(asked.keep, options) if x.name in asked.only]
    left = [name for name in asked.only if name not in {row.name for row in found}]
    for row in measure(left, options):
        console.print(" | ".join(row.cells()), markup=False, soft_wrap=True)
        found.append(row)
        if asked.keep is not None:
            keep(asked.keep, options, row)
    console.print(markdown(found), markup=False, soft_wrap=True)
    if asked.page is not None:
        pages.write(asked.page, {"presets": markdown(found)})
        plot(found, asked.page.parent)


if __name__ == "__main__":
    main()

"""Accuracy, size and latency of integer LiteRT models, against float and Qwix.

    python -m benchmarks.edge [--seeds N ...] [--models NAME ...] [--rounds N]

Trains a CNN with BatchNorm, MobileNet-style depthwise blocks, an NNX MLP and a
transformer encoder in float32 on scikit-learn's handwritten digits (8 x 8 pixels), and
converts each to a float file, an integer file by `aqtlite.edge`, and an integer file by
Qwix's providers for on-device models, all with the same converter. Ranges are
calibrated on the training images. The interpreter runs the files in one thread with the
default kernels.

Columns: mean accuracy on the test images; largest loss of accuracy relative to the
float file, in points; signal-to-noise ratio of the logits relative to the model in JAX;
number of operators, and of float operators among them, without QUANTIZE and DEQUANTIZE.
Quanta are the differences of the outputs from the library's prediction in JAX
(`edge.simulate`; for Qwix, its converted model), in units of the output's scale: the
largest, and the share of outputs that differ. Latencies are medians of files run in
turns in one process, called from Python; in brackets relative to the float file.
"""

import argparse
import collections
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.table

from benchmarks import digits
from benchmarks.edge import files as files_lib
from benchmarks.edge import interpreter
from benchmarks.edge.files import Files
from benchmarks.edge.models import MODELS
from benchmarks.edge.training import Trained, train

_UNLIMITED = 200
"""Width of output that is not a terminal, in columns."""

FLOAT = "float32"
CONTESTANTS: dict[str, Callable[[Trained, Any], Files]] = {
    FLOAT: files_lib.of_floats,
    "aqtlite": lambda trained, x: files_lib.by_aqtlite(trained, x, "integer"),
    "aqtlite, float I/O": lambda trained, x: files_lib.by_aqtlite(trained, x, "float"),
    "Qwix": files_lib.by_qwix,
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Measurements of a file."""

    accuracy: float
    decibels: float
    operators: int
    float_operators: list[str]
    size: int
    quanta: int | None
    differing: float | None
    latency: Mapping[int, float]


def measure(
    files: Files, wanted: Any, test: Any, latency: Mapping[int, float]
) -> Figures:
    """Runs a file on the test images.

    Args:
        files: files of one library.
        wanted: logits of the model in JAX.
        test: test images and labels.
        latency: latency by batch size.
    """
    images, labels = test
    largest = max(files.data)
    data = files.data[largest]
    found = interpreter.outputs(data, images, largest)
    quanta = differing = None
    scale = files_lib.output_scale(data)
    if files.predict is not None and scale is not None:
        batches = interpreter.batches(images, largest)
        predicted = np.concatenate([files.predict(jnp.asarray(x)) for x in batches])
        off = np.rint(np.abs(found - predicted[: len(found)]) / scale)
        quanta, differing = int(off.max()), float((off > 0).mean())
    return Figures(
        float((found.argmax(-1) == labels).mean()),
        float(10 * np.log10(np.square(wanted).sum() / np.square(found - wanted).sum())),
        files_lib.operators(data),
        files_lib.float_operators(data),
        len(files.data[1]),
        quanta,
        differing,
        latency,
    )


def compare(
    trained: Trained, training: Any, test: Any, rounds: int
) -> dict[str, Figures | str]:
    """The figures of each library, or the error it raised."""
    made: dict[str, Files | str] = {}
    for name, make in CONTESTANTS.items():
        # Whatever another library raises is a result.
        try:
            made[name] = make(trained, training)
        except Exception as error:
            if name != "Qwix":
                raise
            made[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    images, wanted = test[0], np.asarray(trained(test[0]))
    works = {name: one for name, one in made.items() if isinstance(one, Files)}
    latency: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for size in files_lib.SIZES:
        data = {name: one.data[size] for name, one in works.items()}
        found = interpreter.latencies(data, images[:size], rounds)
        for name, seconds in found.items():
            latency[name][size] = seconds
    return {
        name: measure(one, wanted, test, latency[name])
        if isinstance(one, Files)
        else one
        for name, one in made.items()
    }


def table(name: str, runs: list[dict[str, Figures | str]]) -> rich.table.Table:
    """The figures of a model, over all seeds."""
    title = f"{name}, {len(runs)} seeds"
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=title)
    shown.add_column("file", no_wrap=True)
    columns = (
        "accuracy",
        "lowest change",
        "SNR, dB",
        "operators",
        "in float",
        "bytes",
        "steps off",
        "outputs off",
    )
    latencies = (f"batch {size}" for size in files_lib.SIZES)
    for column in (*columns, *latencies):
        shown.add_column(column, justify="right")
    for contestant in CONTESTANTS:
        cells = _cells([run[contestant] for run in runs], [run[FLOAT] for run in runs])
        shown.add_row(contestant, *cells)
    return shown


def _cells(ours: list[Any], floats: list[Any]) -> list[str]:
    failed = [one for one in ours if isinstance(one, str)]
    if failed:
        return [f"failed: {failed[0]}"]
    first = ours[0]
    drops = [a.accuracy - b.accuracy for a, b in zip(ours, floats, strict=True)]
    share = first.size / floats[0].size
    cells = [
        f"{statistics.mean(one.accuracy for one in ours):.2%}",
        f"{100 * min(drops):+.2f}",
        f"{statistics.mean(one.decibels for one in ours):.1f}",
        str(first.operators),
        str(len(first.float_operators)),
        f"{first.size:,} ({share:.0%})",
    ]
    quanta = [one.quanta for one in ours]
    cells += (
        ["", ""]
        if None in quanta
        else [
            str(max(quanta)),
            f"{statistics.mean(one.differing for one in ours):.2%}",
        ]
    )
    for size in files_lib.SIZES:
        seconds = statistics.median(one.latency[size] for one in ours)
        ratios = [
            a.latency[size] / b.latency[size] for a, b in zip(ours, floats, strict=True)
        ]
        cells.append(f"{1e6 * seconds:,.1f} µs ({statistics.median(ratios):.2f})")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, exports and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME"
    )
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args(argv)
    errors = rich.console.Console(stderr=True)
    console = rich.console.Console(width=None if sys.stdout.isatty() else _UNLIMITED)
    training, test = digits.load()
    for name in options.models:
        runs = []
        for seed in options.seeds:
            with errors.status(f"{name}, seed {seed}"):
                trained = train(MODELS[name], *training, options.epochs, seed)
                runs.append(compare(trained, training[0], test, options.rounds))
            # Else the programs of all models stay in memory.
            jax.clear_caches()
        console.print(table(name, runs))
        kept = runs[0]["Qwix"]
        if isinstance(kept, Figures) and kept.float_operators:
            counts = collections.Counter(kept.float_operators)
            listed = ", ".join(f"{n} {one}" for one, n in counts.items())
            console.print(f"Qwix leaves in float: {listed}\n")


if __name__ == "__main__":
    main()

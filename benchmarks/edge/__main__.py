"""Files of integers for LiteRT: accuracy, size, latency; beside floats and Qwix.

    python -m benchmarks.edge [--seeds N ...] [--models NAME ...] [--rounds N]

Trains a CNN with BatchNorm, MobileNet-style depthwise blocks, an MLP of NNX and a
transformer encoder on the handwritten digits that scikit-learn ships (8 x 8 pixels), in
float32, and makes files of each: of floats, of integers by `aqtlite.edge`, and of
integers by Qwix's providers for on-device models, all by the same converter. Ranges are
found with the training images. The interpreter runs the files in one thread with its
default kernels.

Columns: the mean accuracy on the test images; its largest loss beside the file of
floats, in points; the noise of the logits beside the model's in JAX, as a
signal-to-noise ratio; operators, and those of floats among them, less QUANTIZE and
DEQUANTIZE. Quanta are the differences of the outputs from what the library predicts in
JAX (`edge.simulate`; Qwix's own converted model), in units of the output's scale: the
largest, and how many outputs differ. Latencies are medians, of files that run in turns
in one process, called from Python; in brackets relative to the file of floats.
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
"""Columns of output that is no terminal."""

FLOAT = "float32"
CONTESTANTS: dict[str, Callable[[Trained, Any], Files]] = {
    FLOAT: files_lib.of_floats,
    "aqtlite": lambda trained, x: files_lib.by_aqtlite(trained, x, "integer"),
    "aqtlite, float I/O": lambda trained, x: files_lib.by_aqtlite(trained, x, "float"),
    "Qwix": files_lib.by_qwix,
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a file."""

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
        files: of one library.
        wanted: the logits of the model in JAX.
        test: the images and their labels.
        latency: by the size of the batch.
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
    """The figures of each library, or how it failed."""
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
        "worst of float",
        "dB",
        "operators",
        "of floats",
        "bytes",
        "quanta",
        "differ",
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
            # Or the programs of all models stay in memory.
            jax.clear_caches()
        console.print(table(name, runs))
        kept = runs[0]["Qwix"]
        if isinstance(kept, Figures) and kept.float_operators:
            counts = collections.Counter(kept.float_operators)
            listed = ", ".join(f"{n} {one}" for one, n in counts.items())
            console.print(f"Qwix leaves in float: {listed}\n")


if __name__ == "__main__":
    main()

"""Compare log-probabilities of decoding with those of training, bit for bit.

    python -m benchmarks.decoding [--models NAME ...] [--dtypes NAME ...]
        [--plot FILE.png] [--quick]

For each model and dtype, in float, in int8 by Qwix and by aqtlite, and in int8 by
aqtlite with bits that depend on values alone: the percentage of all log-probabilities
that are equal to those of the forward over whole sequences, (a) in the forward of a
training step, (b) token by token with a cache, (c) by chunks, (d) of one sequence
alone, in training and decoding, and (e) with a longer cache. Then what each protection
costs (`benchmarks.invariance_cost`), and what caches of few bits lose and take
(`benchmarks.kv_caches`), both in short: by themselves, these commands take longer. And
rewards and divergences of `examples/rollouts.py`. Most of the time is XLA's: 36 models
of one layer, eight programs each. Tunix's model needs the extra `models`, Qwix the
extra `test`.
"""

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import rich.box
from rich.table import Table

import aqtlite
from benchmarks import invariance_cost, kv_caches
from benchmarks.decoding import comparisons, of_functions, of_linen, of_nnx
from benchmarks.decoding.subjects import FLOAT, INT8, QWIX, Sizes, Subject
from benchmarks.harness import progress, tables

Maker = Callable[[str, str, Sizes], Subject]

MODELS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "demo": (of_linen.demo, (FLOAT, QWIX, INT8)),
    "Linen": (of_linen.linen, (FLOAT, QWIX, INT8)),
    "NNX": (of_nnx.nnx_decoder, (FLOAT, INT8)),
    "experts": (of_functions.experts, (FLOAT, QWIX, INT8)),
}
"""What makes each model, and the kinds of it."""

if of_nnx.HAS_TUNIX:
    MODELS["Tunix's Llama"] = (of_nnx.tunix_llama, (FLOAT, INT8))

DTYPES = ("float32", "bfloat16")
INVARIANT = f"{INT8}, invariant"
ROLLOUTS = pathlib.Path(__file__).parents[2] / "examples" / "rollouts.py"
QUICK = Sizes(layers=1, width=16, heads=2, vocabulary=8, batch=2, length=5, chunk=2)


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.decoding", description=__doc__.splitlines()[0]
    )
    result.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    result.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    result.add_argument("--layers", type=int, default=1, help="(default: %(default)s)")
    result.add_argument(
        "--only-bits",
        action="store_true",
        help="neither costs nor rollouts",
    )
    result.add_argument(
        "--plot", metavar="FILE.png", help="plot of rewards and divergences"
    )
    result.add_argument("--quick", action="store_true", help="tiny sizes, as a check")
    return result


def rows(name: str, dtype: str, sizes: Sizes) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the fractions of each kind of a model."""
    maker, kinds = MODELS[name]
    for kind in kinds:
        subject = maker(kind, dtype, sizes)
        yield kind, dict(comparisons.equal(subject, sizes, lambda fn: fn))
        if kind == INT8:
            found = comparisons.equal(subject, sizes, aqtlite.invariant)
            yield INVARIANT, dict(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    asked = parser().parse_args(arguments)
    sizes = QUICK if asked.quick else Sizes(layers=asked.layers)
    console = tables.console()
    drawn = Table(box=None if console.is_terminal else rich.box.MARKDOWN)
    for heading in ("model", "dtype", "", *comparisons.NAMES):
        drawn.add_column(heading)
    with progress.shown(console, asked.models) as report:
        for name in asked.models:
            for dtype in asked.dtypes:
                report(name, dtype)
                for kind, found in rows(name, dtype, sizes):
                    cells = [_percent(found.get(x)) for x in comparisons.NAMES]
                    drawn.add_row(name, dtype, kind, *cells)
                    report(name, f"{dtype}, {kind}: {' '.join(cells)}")
    console.print("Log-probabilities equal to those of training, %")
    console.print(drawn)
    for letter, text in comparisons.NAMES.items():
        console.print(f"  {letter}: {text}")
    if not asked.only_bits:
        costs = ["--each", "--seconds", "5", "--compilations", "3"]
        caches = ["--steps", "120"]
        rollouts = ["--plot", asked.plot] if asked.plot else []
        if asked.quick:
            costs = ["--width", "16", "--seconds", ".1", "--compilations", "1"]
            caches = ["--quick"]
            rollouts.append("--smoke")
        invariance_cost.main(costs)
        kv_caches.main(caches)
        subprocess.run([sys.executable, ROLLOUTS, *rollouts], check=True)


def _percent(fraction: float | None) -> str:
    """Shows a fraction, and 100 only where every bit is equal.

    >>> _percent(1.0), _percent(0.9999), _percent(None)
    ('100', '99.9', '-')
    """
    if fraction is None:
        return "-"
    if fraction == 1:
        return "100"
    return f"{min(100 * fraction, 99.9):.1f}"


if __name__ == "__main__":
    main()

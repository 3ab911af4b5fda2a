"""The workloads by name, and a run of several of them."""

import importlib
from collections.abc import Iterator, Sequence

from benchmarks.figures import Figure
from benchmarks.options import Options
from benchmarks.progress import Report

WORKLOADS = (
    "mlp",
    "attention",
    "transformer",
    "serving",
    "compile",
    "memory",
    "contractions",
    "errors",
)
"""Each is a module of this package with a function ``run(options, report)``."""


def run(
    workloads: Sequence[str], options: Options, report: Report
) -> Iterator[list[Figure]]:
    """The figures of each workload, as soon as it has run."""
    for name in workloads:
        module = importlib.import_module(f"benchmarks.{name}")
        yield module.run(options, lambda what, name=name: report(name, what))

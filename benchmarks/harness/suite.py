"""Names of the workloads, and a function that runs several."""

import importlib
from collections.abc import Iterator, Sequence

from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.harness.progress import Report

WORKLOADS = (
    "mlp",
    "attention",
    "transformer",
    "presets",
    "serving",
    "weight_only",
    "int4",
    "small",
    "static_ranges",
    "kv_cache",
    "compile",
    "rules",
    "memory",
    "contractions",
    "convolution",
    "moe",
    "errors",
)
"""Modules of `benchmarks.workloads`, each with a function ``run(options, report)``."""


def run(
    workloads: Sequence[str], options: Options, report: Report
) -> Iterator[list[Figure]]:
    """Run workloads in turn, and yield the figures of each."""
    for name in workloads:
        module = importlib.import_module(f"benchmarks.workloads.{name}")
        yield module.run(options, lambda what, name=name: report(name, what))

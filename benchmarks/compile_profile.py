"""Show where XLA:CPU spends the time to compile a training step.

    python -m benchmarks.compile_profile [--blocks N]

Compiles the model of `python -m benchmarks --only compile` in float32 and in int8, once
each under the profiler, and prints the time of every phase, summed over threads. Only
distinct kernels are compiled and counted.
"""

import argparse
import collections
import dataclasses
import gzip
import json
import pathlib
import tempfile
from collections.abc import Sequence

import jax
import rich.box
import rich.table

from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness import contestants, tables
from benchmarks.workloads import compile as workload

PHASES = {
    "passes over the program": (
        "HLO passes through layout assignment",
        "HLO passes after layout assignment",
    ),
    "kernels, to LLVM": ("FusionCompiler::Compile",),
    "kernels, to machine code": ("Codegen",),
    "thunks": ("ThunkEmitter::EmitEntryComputation",),
    "all, on the clock": ("backend_compile_and_load",),
}
"""Names in XLA's trace, where the program's name may follow in parentheses."""

KERNEL = "FusionCompiler::Compile"


@dataclasses.dataclass(frozen=True)
class Profile:
    """One compilation."""

    seconds: dict[str, float]
    """Seconds of each phase."""

    kernels: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_profile",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument(
        "--blocks",
        type=arguments_lib.positive,
        metavar="N",
        default=workload.BLOCKS,
        help="(default: %(default)s)",
    )
    asked = parser.parse_args(arguments)
    names = contestants.FLOAT32, contestants.AQTLITE
    found = {one.name: profile(one, asked.blocks) for one in contestants.select(names)}
    table = rich.table.Table("", *found, box=rich.box.MARKDOWN)
    for phase in PHASES:
        table.add_row(
            phase, *(f"{1e3 * one.seconds[phase]:.1f} ms" for one in found.values())
        )
    table.add_row("kernels", *(str(one.kernels) for one in found.values()))
    tables.console().print(table)


def profile(contestant: contestants.Contestant, blocks: int) -> Profile:
    """Compiles a training step under the profiler."""
    lowered = workload.traced(contestant, blocks).lower()
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            lowered.compile()
        (path,) = pathlib.Path(directory).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    micros: dict[str, float] = collections.defaultdict(float)
    kernels = 0
    for event in events:
        if event.get("ph") == "X":
            name = event["name"].partition(" (")[0]
            micros[name] += event["dur"]
            kernels += name == KERNEL
    seconds = {
        phase: sum(micros[name] for name in names) / 1e6
        for phase, names in PHASES.items()
    }
    return Profile(seconds, kernels)


if __name__ == "__main__":
    main()

"""Measure aqtlite against float, AQT and Qwix.

    python -m benchmarks [--quick] [--only NAME ...] [--synchronous] [--json FILE]
                         [--plot FILE.png]

Needs the `test` extra, which installs the peers. docs/benchmarks.md explains the
figures.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from benchmarks.harness import allocator, suite
from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness.options import Options


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    defaults = Options()
    result = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures aqtlite, float and the peers.",
    )
    result.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, for a check that everything runs",
    )
    result.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=suite.WORKLOADS,
        default=list(suite.WORKLOADS),
        help=f"of {', '.join(suite.WORKLOADS)}",
    )
    result.add_argument(
        "--repeats", type=arguments_lib.positive, help="rounds of a comparison, at most"
    )
    result.add_argument(
        "--seconds",
        type=float,
        default=defaults.seconds,
        help="time of a comparison after which it starts no further round "
        "(default %(default)s)",
    )
    result.add_argument(
        "--synchronous",
        action="store_true",
        help="have JAX run programs on CPUs in the thread that calls them",
    )
    result.add_argument("--json", metavar="FILE", type=pathlib.Path)
    result.add_argument("--plot", metavar="FILE.png", type=pathlib.Path)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table for each workload, and write the JSON and the plot."""
    command = parser()
    asked = command.parse_args(arguments)
    workloads = list(dict.fromkeys(asked.only))
    options = Options(
        quick=asked.quick,
        repeats=asked.repeats or (QUICK_REPEATS if asked.quick else Options().repeats),
        seconds=asked.seconds,
        synchronous=asked.synchronous,
    )
    allocator.keep_memory("benchmarks", arguments)

    import jax

    if options.synchronous:
        jax.config.update("jax_cpu_enable_async_dispatch", False)

    from benchmarks import plot
    from benchmarks.harness import machine, progress, tables

    if asked.plot:
        try:
            plot.check(workloads)
        except plot.PlotError as error:
            command.error(str(error))

    console = tables.console()
    described = machine.describe()
    versions = ", ".join(f"{k} {v}" for k, v in described["versions"].items())
    console.print(
        f"{described['backend']}, {described['cores']} cores; {versions}; "
        f"memory at {described['bytes_per_second'] / 1e9:.1f} GB/s"
        f"{', synchronous' * options.synchronous}",
        soft_wrap=True,
    )
    figures = []
    with progress.shown(console, workloads) as report:
        for measured in suite.run(workloads, options, report):
            figures += measured
            console.print(tables.table(measured, markdown=not console.is_terminal))
            if asked.json:
                tables.write_json(
                    asked.json,
                    figures,
                    machine=described,
                    options={"only": workloads, **dataclasses.asdict(options)},
                )
    if asked.plot:
        plot.draw(figures, described, asked.plot)


QUICK_REPEATS = 3


if __name__ == "__main__":
    main()

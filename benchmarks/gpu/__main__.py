"""Time training, serving and decoding on a GPU, against bfloat16 and the peers.

    python -m benchmarks.gpu [--minutes 9] [--json FILE] [--programs FOLDER]

For every program: the time per call, the time of the kernels on the device, and the
temporary memory. Cases run in the order of importance until the time is up. Needs the
`test` extra.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness.options import Options


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    result.add_argument(
        "--repeats",
        type=arguments_lib.positive,
        default=25,
        help="rounds of a comparison, at most (default %(default)s)",
    )
    result.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time after which no further case is started (default %(default)s)",
    )
    result.add_argument(
        "--only", nargs="+", metavar="NAME", help="of the cases, parts of their names"
    )
    result.add_argument("--json", metavar="FILE", type=pathlib.Path)
    result.add_argument(
        "--programs",
        metavar="FOLDER",
        type=pathlib.Path,
        help="write each compiled program and the times of its kernels there",
    )
    result.add_argument(
        "--allow-cpu", action="store_true", help="run without a GPU, at a tiny size"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table for each case, and write JSON if asked."""
    asked = parser().parse_args(arguments)
    end = time.monotonic() + 60 * asked.minutes

    import jax

    gpu = jax.default_backend() == "gpu"
    if not gpu and not asked.allow_cpu:
        sys.exit(
            f"benchmarks.gpu needs a GPU; JAX's backend is {jax.default_backend()} "
            "(--allow-cpu runs a tiny size all the same)"
        )

    from benchmarks.gpu import cases, measuring
    from benchmarks.harness import machine, progress, tables

    options = Options(quick=not gpu, repeats=asked.repeats, seconds=8.0)
    described = machine.describe()
    console = tables.console()
    console.print(
        f"{described['device']}, jax {described['versions']['jax']}; "
        f"memory at {described['bytes_per_second'] / 1e9:.0f} GB/s",
        soft_wrap=True,
    )
    figures = []
    with progress.shown(console, [name for name, _ in cases.CASES]) as report:
        for name, make in cases.CASES:
            if asked.only and not any(part in name for part in asked.only):
                continue
            if time.monotonic() > end:
                report(name, "not run, the time is up")
                continue
            for case, programs in make(quick=options.quick):
                report(name, ", ".join(itertools.starmap("{} {}".format, case.items())))
                measured = measuring.measure(
                    name, case, programs, options, asked.programs
                )
                figures += measured
                console.print(tables.table(measured, markdown=not console.is_terminal))
                if asked.json:
                    tables.write_json(
                        asked.json,
                        figures,
                        machine=described,
                        options=dataclasses.asdict(options),
                    )


if __name__ == "__main__":
    main()

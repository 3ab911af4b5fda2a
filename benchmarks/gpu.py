"""Time the MLP block on a GPU: bfloat16, aqtp and aqtlite, beside the floor.

    python -m benchmarks.gpu [--json FILE]

Widths 4096 and 8192, 8192 tokens as a 2-D input, forward and forward + backward, from
float32 weights. Figures are relative to bfloat16. Needs the `test` extra.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

WIDTHS, TOKENS = (4096, 8192), 8192
CPU_WIDTHS, CPU_TOKENS = (64,), 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    parser.add_argument(
        "--allow-cpu", action="store_true", help="run without a GPU, at a tiny size"
    )
    asked = parser.parse_args(arguments)

    import jax

    gpu = jax.default_backend() == "gpu"
    if not gpu and not asked.allow_cpu:
        sys.exit(
            f"benchmarks.gpu needs a GPU; JAX's backend is {jax.default_backend()} "
            "(--allow-cpu runs a tiny size all the same)"
        )

    from benchmarks.harness import (
        contestants,
        figures,
        machine,
        phases,
        progress,
        tables,
    )
    from benchmarks.harness.options import Options
    from benchmarks.workloads import mlp

    names = (contestants.BFLOAT16, contestants.AQTP, contestants.AQTLITE)
    options = Options(quick=not gpu, repeats=asked.repeats, seconds=60.0)
    widths, tokens = (WIDTHS, TOKENS) if gpu else (CPU_WIDTHS, CPU_TOKENS)
    console = tables.console()
    measured = []
    with progress.shown(console, ["mlp"]) as report:
        for width in widths:
            for phase in phases.PHASES:
                report("mlp", f"width {width}, {phase}")
                case = {"width": width, "tokens": tokens, "phase": phase}
                spreads = mlp.measure(
                    (tokens,), width, phase, contestants.select(names), options
                )
                measured += figures.compare("mlp", case, spreads)
    console.print(tables.table(measured, markdown=not console.is_terminal))
    if asked.json:
        tables.write_json(
            asked.json,
            measured,
            machine=machine.describe(),
            options=dataclasses.asdict(options),
        )


if __name__ == "__main__":
    main()

"""Estimate the cost of programs on a TPU from what XLA compiles for it.

    pip install libtpu
    python -m benchmarks.tpu_estimate [--topology v5e:2x2] [--only serving decoding]

Compiles the cases that `python -m benchmarks.gpu` measures on GPUs: training steps,
layers and tokens in serving, attention and convolutions. Prints, for each contestant,
XLA's estimate of the kernels' cycles, the bytes that the kernels read and write, the
time that these bytes take at the bandwidth of the memory, and the temporary memory. No
TPU is needed, because nothing is run: these are estimates, not measurements. Topologies
have the names of `jax.experimental.topologies`, such as ``v5p:2x2x1``.

The cycles of a loop are those of all its rounds. XLA counts the bytes of a single one;
programs with loops are marked.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import rich.box
from rich.table import Table

from aqtlite.lowering.forms import processor
from aqtlite.reporting import hlo
from benchmarks.gpu import cases
from benchmarks.gpu.measuring import Program
from benchmarks.harness import absent, tables

BANDWIDTH = {
    "TPU v5 lite": 819e9,
    "TPU v5": 2765e9,
    "TPU v6 lite": 1640e9,
}
"""Bytes per second of the memory of a chip (Google Cloud, "TPU versions")."""

NAMES = tuple(name for name, _ in cases.COMPILED)


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu_estimate", description=__doc__.splitlines()[0]
    )
    result.add_argument("--topology", default="v5e:2x2")
    result.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=["training step"],
        help="the cases (default: training step)",
    )
    result.add_argument(
        "--small", action="store_true", help="compile the cases at a tiny size"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile for the first chip of the topology, and print a table of each case."""
    asked = parser().parse_args(arguments)
    missing = f"no topology {asked.topology!r} (pip install libtpu)"
    chip = absent.devices(asked.topology, "tpu", missing)[0]
    console = tables.console()
    for name, make in cases.COMPILED:
        if name in asked.only:
            for case, compared in make(quick=asked.small):
                title = ", ".join(f"{key} {value}" for key, value in case.items())
                drawn = estimates(
                    f"{chip.device_kind}, {name}: {title}", compared, chip
                )
                drawn.box = (
                    rich.box.SIMPLE if console.is_terminal else rich.box.MARKDOWN
                )
                console.print(drawn)


def estimates(title: str, compared: Mapping[str, Program], chip: jax.Device) -> Table:
    """Table of the programs of a case, each beside the first one."""
    drawn = Table(
        "", "cycles, 10^6", "relative", "traffic, GB", "at full bandwidth, ms",
        "temporary, MB", title=title,
    )  # fmt: skip
    first = None
    for name, program in compared.items():
        compiled = compile_for(program, chip)
        text = compiled.as_text()
        cycles = estimated_cycles(text)
        first = first or cycles
        traffic = compiled.cost_analysis()["bytes accessed"]
        bandwidth = BANDWIDTH.get(chip.device_kind)
        drawn.add_row(
            f"{name} (loops)" if " while(" in text else name,
            f"{cycles / 1e6:.3g}",
            f"{cycles / first:.2f} x",
            f"{traffic / 1e9:.2f}",
            f"{1e3 * traffic / bandwidth:.2f}" if bandwidth else "",
            f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}",
        )
    return drawn


def compile_for(program: Program, chip: jax.Device) -> Any:
    """The program, compiled for a TPU that need not be there."""
    # Programs are lowered for the TPU of this process, which has none.
    reads_rows = chip.device_kind in processor.TPUS_THAT_READ_ROWS
    with mock.patch.object(processor, "tpu_reads_rows", lambda: reads_rows):
        return program.compile_for(chip, {})


def estimated_cycles(program: str) -> int:
    r"""Sum of XLA's cycle estimates in the kernels of a TPU program, in all rounds.

    >>> main = "ENTRY %main (x: f32[]) -> f32[] {"
    >>> kernels = (
    ...     '  %y = f32[] negate(%x), backend_config={"estimated_cycles":"20"}',
    ...     '  %z = f32[] negate(%y), backend_config={"estimated_cycles":"4"}', "}"
    ... )
    >>> estimated_cycles("\n".join((main, *kernels)))
    24
    """
    return sum(
        run.times * int(cycles)
        for run in hlo.parse(program).runs()
        for one in run.computation.instructions.values()
        for cycles in re.findall(r'"estimated_cycles":"(\d+)"', one.attributes)
    )


if __name__ == "__main__":
    main()

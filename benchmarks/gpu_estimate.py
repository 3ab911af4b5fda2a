"""Estimate the cost of programs on an H100 from what XLA compiles for it.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    JAX_PLATFORMS=cpu python -m benchmarks.gpu_estimate [--only serving] [--kernels 10]

Compiles the cases that `python -m benchmarks.gpu` measures, and a step of four blocks.
Prints, for each contestant, the bytes that the kernels read and write, the time of a
roofline, and the temporary memory. No GPU is needed, because nothing is run: these are
estimates, not measurements.

A kernel moves each of its arrays once, and takes the time of its bytes at the bandwidth
of the memory, or of its matrix product at the peak of the matrix units, whichever is
longer. The workspace of a product counts as temporary memory only.

XLA times Triton's kernels against cuBLASLt's on the device. Without one, every matrix
product goes to cuBLASLt, or with ``--triton`` to Triton, whose kernels read narrow
operands and write scaled results; a GPU lies between. cuBLASLt multiplies int8 only
where both operands have their contracting axis last in memory; products that do not are
counted as unsupported. On a GPU they run in Triton, several times slower. Nor does the
estimate know of caches, of the time to launch a kernel, or of how near a kernel comes
to the peaks.
"""

import argparse
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.kernels import Kernel, kernels
from benchmarks.gpu.program import H100
from benchmarks.harness import absent, figures, machine, progress, tables
from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness.figures import Figure
from benchmarks.harness.tables import PHASE
from benchmarks.pods.devices import OPTIONS

BANDWIDTH = 3.35e12
"""Bytes per second of an H100 SXM (NVIDIA, "H100 Tensor Core GPU" datasheet)."""

PEAKS = {
    "float32": 494.5e12,
    "bfloat16": 989e12,
    "float16": 989e12,
    "int8": 1979e12,
    "float8_e4m3fn": 1979e12,
    "float8_e5m2": 1979e12,
}
"""Operations per second of its matrix units on dense matrices: half of the datasheet's,
which are for sparse ones. float32 is TF32."""

NAMES = tuple(name for name, _ in cases.COMPILED)


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_estimate", description=__doc__.splitlines()[0]
    )
    result.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=["training step", "blocks", "served block"],
        help="the cases (default: training step, blocks, served block)",
    )
    result.add_argument(
        "--contestants", metavar="PART", help="those with this in their names"
    )
    result.add_argument(
        "--triton",
        action="store_true",
        help="give products to Triton, with the tilings that XLA takes untimed",
    )
    result.add_argument(
        "--small", action="store_true", help="compile the cases at a tiny size"
    )
    result.add_argument(
        "--kernels",
        metavar="COUNT",
        type=arguments_lib.positive,
        help="list so many kernels of each program, the longest first",
    )
    result.add_argument("--json", metavar="FILE", type=pathlib.Path)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile for an H100, print a table of each case, and write JSON if asked."""
    asked = parser().parse_args(arguments)
    missing = "no topology 'h100' of cuda (see the docstring)"
    chip = absent.devices("h100", "cuda", missing, target_config=H100, topology="1x1x1")
    console = tables.console()
    options = dict(OPTIONS["gpu"])
    if asked.triton:
        options["xla_gpu_enable_triton_gemm"] = "True"
    written: list[Figure] = []
    with progress.shown(console, asked.only) as report:
        for name, make in cases.COMPILED:
            for case, programs in make(quick=asked.small) if name in asked.only else ():
                title = ", ".join(itertools.starmap("{} {}".format, case.items()))
                compiled = {}
                for contestant, program in programs.items():
                    if (asked.contestants or "") in contestant:
                        report(name, f"{title}: {contestant}")
                        compiled[contestant] = program.compile_for(chip[0], options)
                estimated = estimates(name, case, compiled)
                console.print(f"{name}: {title}", soft_wrap=True)
                markdown = not console.is_terminal
                console.print(tables.table(estimated, markdown=markdown))
                for contestant, one in compiled.items() if asked.kernels else ():
                    lines = longest(kernels(one.as_text()), asked.kernels)
                    console.print("\n".join([contestant, *lines]), soft_wrap=True)
                written += estimated
    if asked.json:
        tables.write_json(
            asked.json, written, machine=machine.describe(), options=options
        )


def estimates(
    name: str, case: Mapping[str, Any], compiled: Mapping[str, Any]
) -> list[Figure]:
    """What compiled programs move, take by the roofline, hold, and cannot run."""
    found = {key: kernels(one.as_text()) for key, one in compiled.items()}
    moved = {key: sum(x.times * x.bytes for x in one) for key, one in found.items()}
    seconds = {key: sum(map(roofline, one)) for key, one in found.items()}
    held = {
        key: one.memory_analysis().temp_size_in_bytes for key, one in compiled.items()
    }
    unsupported = {
        key: sum(x.times for x in one if not x.is_supported)
        for key, one in found.items()
    }
    return [
        *figures.exact(name, {**case, PHASE: "moved"}, moved, "bytes"),
        *figures.exact(name, {**case, PHASE: "roofline"}, seconds, "s"),
        *figures.exact(name, {**case, PHASE: "temporary"}, held, "bytes"),
        *figures.exact(name, {**case, PHASE: "unsupported"}, unsupported, "operations"),
    ]


def roofline(kernel: Kernel) -> float:
    """Seconds of all executions of a kernel, at the peaks of an H100."""
    one = kernel.bytes / BANDWIDTH
    if kernel.dtype is not None:
        one = max(one, kernel.operations / PEAKS[kernel.dtype])
    return kernel.times * one


def longest(found: Iterable[Kernel], count: int) -> list[str]:
    """Lines of the kernels that take longest."""
    by_time = sorted(found, key=roofline, reverse=True)
    return [
        f"{1e6 * roofline(one):10.1f} us {one.times * one.bytes / 1e6:10.1f} MB"
        f"  {one.name} {one.dtype or ''}"
        for one in by_time[:count]
    ]


if __name__ == "__main__":
    main()

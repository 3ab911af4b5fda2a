"""Estimate the cost of the MLP block on a TPU from the program that XLA compiles.

    pip install libtpu
    python -m benchmarks.tpu_estimate [--topology v5e:2x2]

Compiles the training step of the block at width 4096 with 8192 tokens and prints, for
each contestant, XLA's estimate of the kernels' cycles, the bytes that the kernels read
and write, and the temporary memory of the step. No TPU is needed, because nothing is
run: these are estimates, not measurements. Topologies have the names of
`jax.experimental.topologies`, such as ``v5p:2x2x1``.
"""

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import rich.box
from jax.experimental import topologies
from rich.table import Table

from aqtlite.lowering import processor
from benchmarks.harness import contestants, phases, tables
from benchmarks.harness.contestants import Contestant
from benchmarks.workloads import mlp

WIDTH, TOKENS = 4096, 8192
NAMES = (
    contestants.BFLOAT16,
    contestants.AQTP,
    contestants.QWIX_STOCHASTIC,
    contestants.AQTLITE,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile for the first chip of the topology, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu_estimate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--topology", default="v5e:2x2")
    asked = parser.parse_args(arguments)
    try:
        chip = topologies.get_topology_desc(asked.topology, platform="tpu").devices[0]
    except (RuntimeError, NotImplementedError) as error:
        sys.exit(f"no topology {asked.topology!r} (pip install libtpu): {error}")

    console = tables.console()
    drawn = Table(
        "", "cycles, 10^6", "relative", "traffic, GB", "temporary, MB",
        title=f"{chip.device_kind}: width {WIDTH}, {TOKENS} tokens, forward + backward",
        box=rich.box.SIMPLE if console.is_terminal else rich.box.MARKDOWN,
    )  # fmt: skip
    first = None
    compared = contestants.select(NAMES)
    compared.insert(1, cast_once(compared[0]))
    for contestant in compared:
        compiled = compile_step(contestant, chip)
        cycles = estimated_cycles(compiled.as_text())
        first = first or cycles
        traffic = compiled.cost_analysis()["bytes accessed"]
        temporary = compiled.memory_analysis().temp_size_in_bytes
        drawn.add_row(
            contestant.name,
            f"{cycles / 1e6:.1f}",
            f"{cycles / first:.2f} x",
            f"{traffic / 1e9:.1f}",
            f"{temporary / 1e6:.0f}",
        )
    console.print(drawn)


def cast_once(contestant: Contestant) -> Contestant:
    """The contestant with operands in memory, where XLA casts them in each product."""

    def dot_general(lhs: Any, rhs: Any, dims: Any) -> jax.Array:
        return contestant.dot_general(*jax.lax.optimization_barrier((lhs, rhs)), dims)

    name = f"{contestant.name}, cast once"
    return dataclasses.replace(contestant, name=name, dot_general=dot_general)


def compile_step(contestant: Contestant, chip: jax.Device) -> Any:
    """Training step of the block, compiled for a device."""
    sharding = jax.sharding.SingleDeviceSharding(chip)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for shape in ((TOKENS, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    ]
    step = phases.forward_and_backward(functools.partial(mlp.block, contestant))
    gradient = arguments[0]
    # Programs are lowered for the TPU of this process, which has none.
    reads_rows = chip.device_kind in processor.TPUS_THAT_READ_ROWS
    with mock.patch.object(processor, "tpu_reads_rows", lambda: reads_rows):
        return jax.jit(step).lower(gradient, *arguments).compile()


def estimated_cycles(program: str) -> int:
    """Sum of XLA's cycle estimates in the kernels of a TPU program.

    >>> estimated_cycles('... "estimated_cycles":"20" ... "estimated_cycles":"4"')
    24
    """
    return sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', program))


if __name__ == "__main__":
    main()

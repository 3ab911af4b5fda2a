"""Compile training steps of a transformer for whole pods, and count what chips send.

    pip install libtpu
    python -m benchmarks.pods [--chips 16 64 256] [--layers 8 32] [--json FILE]

A scan over rematerialized layers, bfloat16 activations, float32 weights, and one
sequence for each TPU v5e chip. For each strategy and contestant: the collectives of a
step, the bytes that a chip sends, its memory, and the time of compilation. No TPU is
needed, because nothing is run. `--hosts 8` compiles for hosts of eight H100s instead,
and `--quick` for 8 simulated CPU devices. Hosts take

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    JAX_PLATFORMS=cpu python -m benchmarks.pods --hosts 8
"""

import argparse
import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import aqtlite
from aqtlite import config
from benchmarks.collectives.__main__ import simulate_devices
from benchmarks.collectives.strategies import DEVICES
from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness import contestants, figures, machine, progress, tables
from benchmarks.harness.contestants import (
    AQTLITE,
    AQTP,
    BFLOAT16,
    QWIX_STOCHASTIC,
    Contestant,
)
from benchmarks.harness.figures import Figure
from benchmarks.harness.tables import PHASE
from benchmarks.pods import devices, layouts, training
from benchmarks.pods.model import Sizes
from benchmarks.pods.training import Compiled

NAMES = (BFLOAT16, AQTP, QWIX_STOCHASTIC, AQTLITE)

NARROW_SUMS = f"{AQTLITE}, bfloat16 sums"
"""Chips exchange sums in bfloat16, as the peers' do, and not as exact int32."""

QUICK = Sizes(layers=2, width=64, hidden=128, heads=4, length=8)

EFFORT = "exec_time_optimization_effort"
"""Option of XLA's compiler; -1 compiles ten times faster, and 0 is its default."""


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.pods", description=__doc__.splitlines()[0]
    )
    result.add_argument(
        "--chips",
        nargs="+",
        type=int,
        choices=devices.TOPOLOGIES,
        default=[16],
        help="of 16, 64 and 256",
    )
    result.add_argument(
        "--hosts",
        nargs="+",
        type=arguments_lib.positive,
        help="numbers of hosts of eight H100s, in place of TPUs",
    )
    result.add_argument(
        "--layers", nargs="+", type=arguments_lib.positive, default=[Sizes().layers]
    )
    result.add_argument("--strategies", nargs="+", metavar="NAME")
    result.add_argument("--contestants", nargs="+", metavar="NAME")
    result.add_argument(
        "--effort",
        type=float,
        default=-1.0,
        help="effort of the compiler: -1 for the least, 0 for its default",
    )
    result.add_argument(
        "--options",
        nargs="*",
        metavar="NAME=VALUE",
        help="options of the compiler, in place of those in benchmarks/pods/devices.py",
    )
    result.add_argument("--json", metavar="FILE", type=pathlib.Path)
    result.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model on 8 simulated CPU devices",
    )
    return result


def compared() -> list[Contestant]:
    """The contestants, with rounding of gradients as in their presets."""
    cfg = config.update(
        contestants.aqtlite_config(), {"*.dg_accumulator_dtype": jnp.bfloat16}
    )
    narrow = Contestant(NARROW_SUMS, aqtlite.make_dot_general(cfg), None)
    return [*contestants.select(NAMES), narrow]


def measure(
    case: Mapping[str, Any], compiled: Mapping[str, Compiled]
) -> tuple[list[Figure], list[Figure]]:
    """Figures of a case: of the whole step, and of each kind of collective."""
    whole = {
        ("collectives", "operations"): lambda one: sum(
            x.times for x in one.collectives
        ),
        ("sent", "bytes"): lambda one: sum(x.sent for x in one.collectives),
        ("memory", "bytes"): lambda one: one.memory,
        ("temporary", "bytes"): lambda one: one.temporary,
        ("compile", "s"): lambda one: one.seconds,
    }
    totals = []
    for (phase, unit), of in whole.items():
        values = {name: of(one) for name, one in compiled.items()}
        totals += figures.exact("pods", {**case, PHASE: phase}, values, unit)
    by_kind: dict[str, dict[str, collections.Counter[str]]] = {}
    for name, one in compiled.items():
        for collective in one.collectives:
            kind = f"{collective.op} {collective.dtype}"
            found = by_kind.setdefault(kind, {})
            counted = found.setdefault(name, collections.Counter())
            counted["times"] += collective.times
            counted["sent"] += collective.sent
    kinds = []
    for kind in sorted(by_kind):
        for phase, unit in (("times", "operations"), ("sent", "bytes")):
            values = {name: found[phase] for name, found in by_kind[kind].items()}
            detailed = {**case, "collectives": kind, PHASE: phase}
            kinds += figures.exact("pods, kinds", detailed, values, unit)
    return totals, kinds


def cases(
    asked: argparse.Namespace,
) -> Iterator[tuple[layouts.Strategy, Sizes, Sequence[Any]]]:
    """The strategies, sizes and devices that the command line asks for."""
    for found in _devices(asked):
        for layers in [QUICK.layers] if asked.quick else asked.layers:
            sizes = dataclasses.replace(
                QUICK if asked.quick else Sizes(), layers=layers
            )
            for strategy in layouts.strategies(len(found)):
                if not asked.strategies or strategy.name in asked.strategies:
                    yield strategy, sizes, found


def _devices(asked: argparse.Namespace) -> Iterator[Sequence[jax.Device]]:
    if asked.quick:
        yield jax.devices("cpu")[:DEVICES]
    elif asked.hosts:
        yield from map(devices.h100s, asked.hosts)
    else:
        yield from map(devices.tpus, asked.chips)


def options_of(asked: argparse.Namespace, platform: str) -> dict[str, Any]:
    """Options of the compiler for a platform."""
    options = devices.OPTIONS[platform]
    if asked.options is not None:
        options = dict(option.split("=", 1) for option in asked.options)
    return {EFFORT: asked.effort, **options} if platform == "tpu" else {**options}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print the tables, and write JSON if asked."""
    asked = parser().parse_args(arguments)
    if asked.quick:
        simulate_devices()
    console = tables.console()
    totals: list[Figure] = []
    kinds: list[Figure] = []
    with progress.shown(console, ["pods"]) as report:
        for strategy, sizes, found in cases(asked):
            options = options_of(asked, found[0].platform)
            case = {
                "strategy": strategy.name,
                "chips": len(found),
                "layers": sizes.layers,
            }
            compiled = {}
            for contestant in compared():
                if asked.contestants and contestant.name not in asked.contestants:
                    continue
                report(
                    "pods", f"{', '.join(map(str, case.values()))}: {contestant.name}"
                )
                compiled[contestant.name] = training.compile_step(
                    contestant, strategy, sizes, found, options
                )
            of_case, of_kinds = measure(case, compiled)
            totals += of_case
            kinds += of_kinds
            if asked.json:
                tables.write_json(
                    asked.json,
                    totals + kinds,
                    machine=machine.describe(),
                    options={"compiler": options, **dataclasses.asdict(sizes)},
                )
    for one in (totals, kinds):
        console.print(tables.table(one, markdown=not console.is_terminal))


if __name__ == "__main__":
    main()

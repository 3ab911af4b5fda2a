"""Break down the time per generated token of a small model on a CPU.

    python -m benchmarks.token_profile [--layers N] [--width N] [--rounds N]

Decodes with the model of `aqtlite demo` in float32, frozen in int8, frozen in int8 with
static ranges (without computing scales of activations), and frozen in int8 with an int8
KV cache, as in the demo; the other models have a float32 cache. The kernels of the
compiled step are counted and timed individually in a trace, which slows each down a
little; the time of a kind is the sum of the kernels' medians. The last rows are
wall-clock times per token without a trace: with the variables as a list, and as a
pytree, which Python flattens at every call, as for any jitted function.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import json
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.box
import rich.table

from aqtlite import config
from aqtlite.flax import calibrate, convert
from aqtlite_demo import generate
from aqtlite_demo.model import Transformer
from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness import contestants, tables

CONFIGS = {
    "float32": (None, "float32"),
    "int8": (contestants.aqtlite_config(), "float32"),
    "int8, static ranges": (config.static_int8(), "float32"),
    "int8, int8 cache": (contestants.aqtlite_config(), "int8"),
}
"""Config of each model, and dtype of the cache."""

LAYERS, WIDTH, HEADS, LENGTH = 4, 192, 4, 128
ROUNDS = 10

CONTRACTIONS, REDUCTIONS, LOOPS = "contractions", "reductions", "other loops"
KINDS = (CONTRACTIONS, REDUCTIONS, LOOPS, "copies", "sampling")
ALL, LIST, TREE = "all", "on the clock", "on the clock, variables as a tree"

_NO_KERNELS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\(")


Decode = Callable[[], Iterator[float]]
"""Function that fills a new cache, and yields the seconds of each token."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A compiled decoding step."""

    kinds: Mapping[str, str]
    """Kind of each kernel, by name in XLA's program and trace."""

    with_variables: Mapping[str, Decode]
    """Decoding functions, by the way in which variables are passed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Decode, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.token_profile",
        description=__doc__.splitlines()[0],
    )
    for name, default, what in (
        ("--layers", LAYERS, "of the model"),
        ("--width", WIDTH, "of the model, a multiple of 4"),
        ("--rounds", ROUNDS, "in each of which every model decodes a sequence"),
    ):
        parser.add_argument(
            name,
            type=arguments_lib.positive,
            metavar="N",
            default=default,
            help=f"{what} (default: %(default)s)",
        )
    asked = parser.parse_args(arguments)
    if asked.width % HEADS:
        parser.error(f"--width must be a multiple of {HEADS}, got {asked.width}")
    decoders = {}
    for name, (cfg, cache) in CONFIGS.items():
        model, variables = _model(cfg, asked.layers, asked.width)
        model = model.clone(decode=True, cache=generate.cache_config(cache))
        decoders[name] = decoder(model, variables)
    seconds = {
        row: clock(
            {name: one.with_variables[row] for name, one in decoders.items()},
            asked.rounds,
        )
        for row in (LIST, TREE)
    }
    traced = {name: trace(one) for name, one in decoders.items()}
    tables.console().print(_table(decoders, traced, seconds))


def _model(
    cfg: config.DotGeneral | None, layers: int, width: int
) -> tuple[Transformer, Any]:
    """A model and its variables, frozen unless they are float."""
    model = Transformer(layers, width, HEADS, LENGTH, cfg=cfg)
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    variables = model.init(jax.random.key(0), tokens)
    if cfg is not None:
        if cfg == config.static_int8():
            variables = calibrate(model, variables, [tokens])
        variables = convert(model, variables, tokens)
    return model, variables


def decoder(model: Transformer, variables: Any) -> Decoder:
    """Compiles a decoding step.

    Args:
        model: model with ``decode=True``.
        variables: variables of the model.
    """
    token, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    step = generate.decode_step(model, variables)

    def decode(flatten: Callable[[], Any]) -> Iterator[float]:
        cache, sampled = generate.init_cache(model), token
        for _ in range(model.length):
            start = time.perf_counter()
            flatten()
            cache, sampled = step(cache, sampled, key)
            sampled.block_until_ready()
            yield time.perf_counter() - start

    ways = {LIST: lambda: None, TREE: lambda: jax.tree.leaves(variables)}
    return Decoder(
        kinds_of(step.compiled.as_text()),
        {row: functools.partial(decode, way) for row, way in ways.items()},
    )


def kinds_of(program: str) -> dict[str, str]:
    """The kind of each kernel of a compiled program, by name.

    >>> kinds_of('''ENTRY %main (x: f32[2]) -> f32[] {
    ...   %x = f32[2]{0} parameter(0)
    ...   %exp = f32[2]{0} fusion(%x), kind=kLoop
    ...   ROOT %dot.1 = f32[] dot(%exp, %exp)
    ... }''')
    {'exp': 'other loops', 'dot.1': 'contractions'}
    """
    entry = program[program.index("\nENTRY") + 1 if "\nENTRY" in program else 0 :]
    kinds = {}
    for line in entry.splitlines()[1:]:
        if line.startswith("}"):
            break
        instruction = _INSTRUCTION.match(line.strip())
        if instruction is None or instruction[2] in _NO_KERNELS:
            continue
        name, opcode = instruction.groups()
        if opcode in ("dot", "custom-call") or "kind=kCustom" in line:
            kinds[name] = CONTRACTIONS
        elif opcode == "copy":
            kinds[name] = "copies"
        elif opcode in ("while", "call"):  # JAX 0.12 calls a short loop.
            kinds[name] = "sampling"
        else:
            kinds[name] = REDUCTIONS if "reduce" in name else LOOPS
    return kinds


def clock(programs: Mapping[str, Decode], rounds: int) -> dict[str, float]:
    """The median seconds per token of programs that take turns."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        collections.deque(program(), maxlen=0)
    for _ in range(rounds):
        for name, program in programs.items():
            taken[name] += program()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def trace(one: Decoder) -> dict[str, float]:
    """The median seconds per token of each kernel, by name."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            collections.deque(one.with_variables[LIST](), maxlen=0)
        (path,) = pathlib.Path(directory).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    taken = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["name"] in one.kinds:
            taken[event["name"]].append(event["dur"] / 1e6)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _table(
    decoders: Mapping[str, Decoder],
    traced: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, Mapping[str, float]],
) -> rich.table.Table:
    table = rich.table.Table("", *decoders, box=rich.box.MARKDOWN)
    for kind in (*KINDS, ALL):
        cells = []
        for name, one in decoders.items():
            names = [k for k, own in one.kinds.items() if kind in (own, ALL)]
            taken = sum(traced[name].get(k, 0.0) for k in names)
            cells.append(f"{len(names)}: {1e6 * taken:.1f} us")
        table.add_row(kind, *cells)
    for row, taken in seconds.items():
        base, *_ = taken.values()
        cells = [f"{1e6 * one:.0f} us, {one / base:.2f} x" for one in taken.values()]
        table.add_row(row, *cells)
    return table


if __name__ == "__main__":
    main()

"""What devices exchange: the collectives of a training step, and of serving.

    python -m benchmarks.collectives

An MLP, 512 -> 2048 -> 512, on 8 simulated CPU devices, by the strategies that models
are distributed with. Counted in the compiled program: how many collectives, and the
bytes of their results on each device. The last column is the largest difference of the
updated weights, or of the output, from those of one device. Needs the `test` extra,
which installs aqtp and qwix.
"""

import argparse
import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import contestants, tables
from benchmarks.contestants import AQTLITE, AQTP, FLOAT32, QWIX_STOCHASTIC, Contestant

DEVICES = 8
NAMES = (FLOAT32, AQTLITE, AQTP, QWIX_STOCHASTIC)
TENSOR_PARALLEL = {"up": P(None, "model"), "down": P("model", None)}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the arrays of a training step lie on a mesh of axes "data" and "model"."""

    name: str
    mesh: tuple[int, int]
    input: P
    weights: Mapping[str, P]
    activations: Mapping[str, P] = dataclasses.field(default_factory=dict)
    """What the model constrains: the input, the hidden layer, the output."""

    def device_mesh(self) -> jax.sharding.Mesh:
        """The mesh, of simulated devices."""
        auto = (jax.sharding.AxisType.Auto,) * 2
        devices = jax.devices("cpu")[: math.prod(self.mesh)]
        return jax.make_mesh(self.mesh, ("data", "model"), auto, devices=devices)


STRATEGIES = (
    Strategy("data parallel 8", (8, 1), P("data"), {"up": P(), "down": P()}),
    Strategy("FSDP 8", (8, 1), P("data"), {"up": P("data"), "down": P("data")}),
    Strategy("tensor parallel 2 x 4", (2, 4), P("data"), TENSOR_PARALLEL),
    Strategy(
        "FSDP x TP 2 x 4",
        (2, 4),
        P("data"),
        {"up": P("data", "model"), "down": P("model", "data")},
        {"input": P("data"), "hidden": P("data", "model"), "output": P("data")},
    ),
    Strategy(
        "sequence parallel 2 x 4",
        (2, 4),
        P("data", "model"),
        TENSOR_PARALLEL,
        {
            "input": P("data", "model"),
            "hidden": P("data", None, "model"),
            "output": P("data", "model"),
        },
    ),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    width: int = 512
    hidden: int = 2048
    sequences: int = 8
    length: int = 64
    rows: int = 256

    def input_shape(self, strategy: Strategy) -> tuple[int, ...]:
        """Sequences where they are cut, otherwise rows."""
        if len(strategy.input) > 1:
            return self.sequences, self.length, self.width
        return self.rows, self.width


# --- What is counted ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a compiled program."""

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtype and shape of each."""
    times: int = 1
    """How often it runs: the trip counts of the loops around it."""

    @property
    def bytes(self) -> int:
        """Of its results on one device, however often it runs."""
        sizes = (_bits(dtype) * math.prod(shape) for dtype, shape in self.results)
        return self.times * sum(sizes) // 8


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype.partition("e")[0]))


_KINDS = (
    "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    "collective-broadcast|ragged-all-to-all"
)
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(?:-start)?\(")
_RESULT = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)"
)
_TRIPS = re.compile(r'known_trip_count.*?"n":"(\d+)"')


def count(hlo: str) -> list[Collective]:
    """The collectives of a compiled program, from its text."""
    found: list[tuple[str, Collective]] = []
    callers: dict[str, tuple[str, int]] = {}
    inside = ""
    for line in hlo.splitlines():
        if (header := _COMPUTATION.match(line)) and not line.startswith(" "):
            inside = header[1]
            continue
        trips = int(known[1]) if (known := _TRIPS.search(line)) else 1
        for called in _CALLED.finditer(line):
            for name in called[1].replace("%", "").split(", "):
                callers[name] = inside, trips
        if collective := _COLLECTIVE.search(line):
            results = tuple(
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _RESULT.findall(collective[1])
            )
            found.append((inside, Collective(collective[2], results)))
    return [
        dataclasses.replace(one, times=_times(computation, callers))
        for computation, one in found
    ]


def _times(computation: str, callers: Mapping[str, tuple[str, int]]) -> int:
    times = 1
    while computation in callers:
        computation, trips = callers[computation]
        times *= trips
    return times


# --- A training step ---------------------------------------------------------------


def training_step(
    contestant: Contestant, strategy: Strategy, mesh: jax.sharding.Mesh | None
) -> Callable[..., Any]:
    """One step of gradient descent; no mesh is for one device."""

    def constrained(x: jax.Array, name: str) -> jax.Array:
        if mesh is None or name not in strategy.activations:
            return x
        sharding = NamedSharding(mesh, strategy.activations[name])
        return jax.lax.with_sharding_constraint(x, sharding)

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        x = constrained(x, "input")
        hidden = contestant.dot_general(x, weights["up"], dims)
        hidden = constrained(jax.nn.relu(constrained(hidden, "hidden")), "hidden")
        out = contestant.dot_general(hidden, weights["down"], dims)
        return jnp.square(constrained(out, "output") - y).mean()

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def train(
    contestant: Contestant, strategy: Strategy, sizes: Sizes
) -> tuple[list[Collective], Callable[[], float]]:
    """The collectives of a step, and what says how far it is from one device's."""
    rng = np.random.default_rng(0)
    shape = sizes.input_shape(strategy)
    x, y = (rng.standard_normal(shape, np.float32) for _ in "xy")
    weights = {
        "up": rng.standard_normal((sizes.width, sizes.hidden), np.float32),
        "down": rng.standard_normal((sizes.hidden, sizes.width), np.float32),
    }
    weights = {k: w / np.float32(len(w) ** 0.5) for k, w in weights.items()}
    mesh = strategy.device_mesh()
    by_weight = {k: NamedSharding(mesh, spec) for k, spec in strategy.weights.items()}
    by_input = NamedSharding(mesh, strategy.input)
    shardings = by_weight, by_input, by_input
    step = jax.jit(
        training_step(contestant, strategy, mesh),
        in_shardings=shardings,
        out_shardings=(by_weight, NamedSharding(mesh, P())),
    )
    compiled = step.lower(weights, x, y).compile()

    def from_one_device() -> float:
        alone, _ = jax.jit(training_step(contestant, strategy, None))(weights, x, y)
        got, _ = compiled(*jax.device_put((weights, x, y), shardings))
        return difference(got, alone)

    return count(compiled.as_text()), from_one_device


def difference(got: Any, wanted: Any) -> float:
    """The largest one, over the largest magnitude."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in pairs
    )


# --- Serving -----------------------------------------------------------------------


class Mlp(nn.Module):
    """The two layers, with weights that say how they lie."""

    dot_general: Any
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Both layers of a batch."""
        widths = {"up": self.sizes.hidden, "down": self.sizes.width}
        for name, width in widths.items():
            spec = tuple(TENSOR_PARALLEL[name])
            x = nn.Dense(
                width,
                use_bias=False,
                name=name,
                dot_general=self.dot_general,
                kernel_init=nn.with_partitioning(
                    nn.initializers.lecun_normal(), (*spec, None)[:2]
                ),
            )(x)
            x = nn.relu(x) if name == "up" else x
        return x


SERVING_ROWS = 8


def serve(
    dot_general: Any, freeze: Callable[..., Any], sizes: Sizes
) -> tuple[list[Collective], float]:
    """The collectives of a few rows through weights that lie tensor parallel."""
    strategy = STRATEGIES[2]
    mesh = strategy.device_mesh()
    model = Mlp(dot_general, sizes)
    x = jnp.asarray(
        np.random.default_rng(1).standard_normal(
            (SERVING_ROWS, sizes.width), np.float32
        )
    )
    variables = freeze(model, model.init(jax.random.key(0), x), x)
    alone = jax.jit(model.apply)(variables, x)
    sharded = jax.device_put(
        variables, nn.get_sharding(jax.eval_shape(lambda: variables), mesh)
    )
    rows = NamedSharding(mesh, P("data"))
    apply = jax.jit(model.apply, out_shardings=rows)
    compiled = apply.lower(sharded, jax.device_put(x, rows)).compile()
    return count(compiled.as_text()), difference(compiled(sharded, x), alone)


def served() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Who serves, and how each freezes its weights."""
    from aqtlite.flax import AqtDotGeneral, convert

    return {
        FLOAT32: (jax.lax.dot_general, lambda model, variables, x: variables),
        AQTLITE: (AqtDotGeneral(contestants.aqtlite_config()), convert),
    }


# --- The tables --------------------------------------------------------------------


def rows(
    strategies: Sequence[Strategy], sizes: Sizes
) -> Iterator[tuple[str, str, list[Collective], float]]:
    """Strategy, contestant, collectives and difference, one after the other."""
    for strategy in strategies:
        for contestant in contestants.select(NAMES):
            found, from_one_device = train(contestant, strategy, sizes)
            yield strategy.name, contestant.name, found, from_one_device()
    for name, how in served().items():
        yield f"serving {SERVING_ROWS} rows, 2 x 4", name, *serve(*how, sizes)


def describe(collectives: Sequence[Collective]) -> str:
    """How many of each kind."""
    kinds = collections.Counter[str]()
    for one in collectives:
        kinds[one.kind] += one.times
    return ", ".join(f"{times} {kind}" for kind, times in kinds.items())


def simulate_devices() -> None:
    """Makes JAX see several CPU devices; before it has looked for any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that everything runs"
    )
    quick = parser.parse_args(arguments).quick
    simulate_devices()
    sizes = Sizes(32, 64, 8, 8, 16) if quick else Sizes()
    lines = ["| strategy | | collectives | MB | of them | from one device |"]
    lines.append("| --- | --- | ---: | ---: | --- | ---: |")
    for strategy, name, collectives, off in rows(STRATEGIES, sizes):
        times = sum(one.times for one in collectives)
        size = sum(one.bytes for one in collectives) / 2**20
        kinds = describe(collectives)
        lines.append(
            f"| {strategy} | {name} | {times} | {size:.3f} | {kinds} | {off:.1e} |"
        )
    for line in lines:
        tables.console().print(line, soft_wrap=True)


if __name__ == "__main__":
    main()

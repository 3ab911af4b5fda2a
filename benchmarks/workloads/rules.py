"""The cost of quantizing by rules, against injecting the same contractions.

    python -m benchmarks --only rules

Training steps of a plain function (`quantize_function`), of a Linen transformer and of
12 Linen blocks without a scan (`aqtlite.flax.quantize_model`), and of NNX blocks
(`aqtlite.flax.nnx.quantize_model`): number of StableHLO operations, number of
instructions of the compiled program, and the time to trace, to lower and to run. To
trace and to lower, also of a Linen transformer of 12 blocks, and of all models in
float32. Times are processor time, which other programs disturb less; JAX's caches are
cleared before each trace.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import aqtlite
from aqtlite import Rule
from aqtlite.flax import AqtDotGeneral, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from benchmarks.harness import contestants, figures, timing
from benchmarks.harness.contestants import RNG_STREAM
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.workloads import compile as blocks_lib
from benchmarks.workloads import transformer

FLOAT, INJECTED, RULES = contestants.FLOAT32, "injected", "rules"
QUANTIZED = INJECTED, RULES

LAYERS, BLOCKS, WIDTH, ROWS = 2, 12, 256, 512
QUICK_LAYERS, QUICK_BLOCKS, QUICK_WIDTH, QUICK_ROWS = 1, 2, 16, 4
TRACES, QUICK_TRACES = 9, 1

CFG = contestants.aqtlite_config()
OF_WEIGHTS = (
    Rule(operands="weight", cfg=CFG),
    Rule(operands="activations", cfg=None, is_required=False),
)

Loss = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in float, and quantized in both ways."""

    losses: Mapping[str, Loss]
    """Loss of the parameters and the input, by contestant."""
    params: Mapping[str, Any]
    """Parameters, by contestant."""
    x: jax.Array


def plain(width: int, rows: int) -> Case:
    """Two layers in a function without a framework."""
    dims = (((1,), (0,)), ((), ()))

    def layers(dot_general: Callable[..., jax.Array]) -> Loss:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            hidden = jax.nn.relu(dot_general(x, params[0], dims))
            return jnp.square(dot_general(hidden, params[1], dims)).mean()

        return loss

    up, down = jax.random.split(jax.random.key(1))
    params = (
        jax.random.normal(up, (width, 4 * width)) / width**0.5,
        jax.random.normal(down, (4 * width, width)) / (4 * width) ** 0.5,
    )
    by_rules = aqtlite.quantize_function(layers(jax.lax.dot_general), CFG, params=0)
    losses: dict[str, Loss] = {
        FLOAT: layers(jax.lax.dot_general),
        INJECTED: layers(aqtlite.make_dot_general(CFG)),
        RULES: by_rules,
    }
    x = jax.random.normal(jax.random.key(2), (rows, width))
    return Case(losses, dict.fromkeys(losses, params), x)


def linen(model: Any, x: jax.Array) -> Case:
    """A Linen model with an argument ``dot_general_cls``."""
    rngs = {RNG_STREAM: jax.random.key(0)}
    params = jax.jit(model.init)(rngs, x)["params"]

    def loss_of(model: Any) -> Loss:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.square(model.apply({"params": params}, x, rngs=rngs)).mean()

        return loss

    losses = {
        FLOAT: loss_of(model),
        INJECTED: loss_of(model.clone(dot_general_cls=lambda: AqtDotGeneral(CFG))),
        RULES: loss_of(quantize_model(model, OF_WEIGHTS)),
    }
    return Case(losses, dict.fromkeys(losses, params), x)


class Blocks(nnx.Module):
    """Residual blocks of two layers."""

    def __init__(self, layers: int, width: int, **kwargs: Any) -> None:
        rngs = nnx.Rngs(0)
        self.ups = nnx.List(
            nnx.Linear(width, 4 * width, rngs=rngs, **kwargs) for _ in range(layers)
        )
        self.downs = nnx.List(
            nnx.Linear(4 * width, width, rngs=rngs, **kwargs) for _ in range(layers)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(nnx.relu(up(x)))
        return x


def of_nnx(layers: int, width: int, rows: int) -> Case:
    """The NNX blocks."""
    losses: dict[str, Loss] = {}
    params: dict[str, Any] = {}
    injected = Blocks(layers, width, dot_general=aqt_nnx.AqtDotGeneral(CFG))
    by_rules = aqt_nnx.quantize_model(Blocks(layers, width), CFG)
    in_float = Blocks(layers, width)
    models = (FLOAT, in_float), (INJECTED, injected), (RULES, by_rules)
    for name, model in models:
        parts: Any = nnx.split(model, nnx.Param, ...)
        structure, params[name], rest = parts

        def loss(
            params: Any, x: jax.Array, structure: Any = structure, rest: Any = rest
        ) -> jax.Array:
            return jnp.square(nnx.merge(structure, params, rest)(x)).mean()

        losses[name] = loss
    x = jax.random.normal(jax.random.key(2), (rows, width))
    return Case(losses, params, x)


def step(loss: Loss) -> Any:
    """A training step."""

    def descend(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return jax.jit(descend)


def measure(case: Case, options: Options) -> dict[str, Any]:
    """Spreads of the quantized contestants, by phase, with their unit."""
    compiled, operations, instructions = {}, {}, {}
    for name in QUANTIZED:
        jax.clear_caches()
        lowered = step(case.losses[name]).lower(case.params[name], case.x)
        compiled[name] = lowered.compile()
        operations[name] = timing.spread([lowered.as_text().count(" = ")])
        instructions[name] = timing.spread([compiled[name].as_text().count(" = ")])
    programs = {
        name: lambda name=name: compiled[name](case.params[name], case.x)
        for name in QUANTIZED
    }
    steps = timing.alternate(
        programs,
        repeats=options.repeats,
        seconds=options.seconds,
        clock=time.process_time,
    )
    return {
        "StableHLO": (operations, "operations"),
        "compiled": (instructions, "operations"),
        "step": (steps, "s"),
    }


def measure_tracing(case: Case, repeats: int) -> dict[str, Any]:
    """Spreads of the time to trace and to lower a step, by phase, with their unit."""
    traced: dict[str, list[float]] = {name: [] for name in case.losses}
    lowered: dict[str, list[float]] = {name: [] for name in case.losses}
    for _ in range(repeats):
        for name, loss in case.losses.items():
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            program = step(loss).trace(case.params[name], case.x)
            middle = time.process_time()
            program.lower()
            traced[name].append(middle - start)
            lowered[name].append(time.process_time() - middle)
    return {
        phase: ({name: timing.spread(took) for name, took in times.items()}, "s")
        for phase, times in (("trace", traced), ("lower", lowered))
    }


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Every model, injected and by rules."""
    layers, blocks, width, rows, traces = (
        (QUICK_LAYERS, QUICK_BLOCKS, QUICK_WIDTH, QUICK_ROWS, QUICK_TRACES)
        if options.quick
        else (LAYERS, BLOCKS, WIDTH, ROWS, TRACES)
    )
    tokens = jnp.arange(rows).reshape(4, -1) % 256
    inputs = jnp.ones((4, 16, blocks_lib.WIDTH))

    def linen_transformer(layers: int) -> Case:
        return linen(transformer.Transformer(layers, width, 4, None), tokens)

    cases = {
        "plain function": lambda: plain(width, rows),
        f"Linen transformer of {layers} blocks": lambda: linen_transformer(layers),
        f"Linen MLP of {blocks} blocks": lambda: linen(
            blocks_lib.Mlp(None, blocks), inputs
        ),
        f"NNX MLP of {layers} blocks": lambda: of_nnx(layers, width, rows),
    }
    measured = []
    for model, make in cases.items():
        report(model)
        made = make()
        phases = measure(made, options) | measure_tracing(made, traces)
        for phase, (spreads, unit) in phases.items():
            case = {"model": model, "phase": phase}
            measured += figures.compare("rules", case, spreads, unit)
    model = f"Linen transformer of {blocks} blocks"
    report(model)
    for phase, (spreads, unit) in measure_tracing(
        linen_transformer(blocks), traces
    ).items():
        case = {"model": model, "phase": phase}
        measured += figures.compare("rules", case, spreads, unit)
    return measured

"""The cost of quantizing by rules, against injecting the same contractions.

    python -m benchmarks --only rules

Training steps of a plain function (`quantize_function`), of a Linen transformer and of
12 Linen blocks without a scan (`aqtlite.flax.quantize_model`), and of NNX blocks
(`aqtlite.flax.nnx.quantize_model`): number of StableHLO operations, number of
instructions of the compiled program, and the time to trace and to run. Times are
processor time, which other programs disturb less.
"""

import dataclasses
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

INJECTED, RULES = "injected", "rules"

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
    """A model quantized in both ways."""

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
    for name, model in ((INJECTED, injected), (RULES, by_rules)):
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


def measure(case: Case, traces: int, options: Options) -> dict[str, Any]:
    """Spreads of each contestant, by unit and phase."""
    compiled, operations, instructions = {}, {}, {}
    for name, loss in case.losses.items():
        jax.clear_caches()
        lowered = step(loss).lower(case.params[name], case.x)
        compiled[name] = lowered.compile()
        operations[name] = timing.spread([lowered.as_text().count(" = ")])
        instructions[name] = timing.spread([compiled[name].as_text().count(" = ")])
    traced: dict[str, list[float]] = {name: [] for name in case.losses}
    for _ in range(traces):
        for name, loss in case.losses.items():
            jax.clear_caches()
            start = time.process_time()
            step(loss).trace(case.params[name], case.x)
            traced[name].append(time.process_time() - start)
    programs = {
        name: lambda name=name: compiled[name](case.params[name], case.x)
        for name in case.losses
    }
    return {
        "StableHLO": (operations, "operations"),
        "compiled": (instructions, "operations"),
        "trace": ({name: timing.spread(took) for name, took in traced.items()}, "s"),
        "step": (
            timing.alternate(
                programs,
                repeats=options.repeats,
                seconds=options.seconds,
                clock=time.process_time,
            ),
            "s",
        ),
    }


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Every model, injected and by rules."""
    layers, blocks, width, rows, traces = (
        (QUICK_LAYERS, QUICK_BLOCKS, QUICK_WIDTH, QUICK_ROWS, QUICK_TRACES)
        if options.quick
        else (LAYERS, BLOCKS, WIDTH, ROWS, TRACES)
    )
    tokens = jnp.arange(rows).reshape(4, -1) % 256
    cases = {
        "plain function": lambda: plain(width, rows),
        f"Linen transformer of {layers} blocks": lambda: linen(
            transformer.Transformer(layers, width, 4, None), tokens
        ),
        f"Linen MLP of {blocks} blocks": lambda: linen(
            blocks_lib.Mlp(None, blocks), jnp.ones((4, 16, blocks_lib.WIDTH))
        ),
        f"NNX MLP of {layers} blocks": lambda: of_nnx(layers, width, rows),
    }
    measured = []
    for model, make in cases.items():
        report(model)
        for phase, (spreads, unit) in measure(make(), traces, options).items():
            case = {"model": model, "phase": phase}
            measured += figures.compare("rules", case, spreads, unit)
    return measured

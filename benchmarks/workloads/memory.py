"""Memory of a training step, of calibration and of conversion, against float and peers.

    python -m benchmarks --only memory

- Temporary memory, reported by XLA, of the compiled training step of an MLP of 8
  blocks: unrolled, and as a scan over rematerialized blocks.
- Temporary memory and results of a training step of a 12-layer transformer, with
  several policies of `jax.checkpoint`, including `aqtlite.remat.save_quantized()`.
- Growth of the memory of a process that calibrates or converts a stack of layers,
  beside their float32 weights (Linux only).
- Bytes that a stack of 4 plain layers saves for the backward pass, without arguments.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite import remat
from benchmarks.harness import contestants, figures
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.pods.model import Sizes, training_step
from benchmarks.workloads import mlp, peaks

BLOCKS, LAYERS = 8, 4
WIDTH, TOKENS, SAVED_TOKENS = 256, 1024, 4096
QUICK_WIDTH, QUICK_TOKENS, QUICK_SAVED_TOKENS = 64, 64, 256

NAMES = (contestants.FLOAT32, contestants.AQTP, contestants.AQTLITE)

TRANSFORMER = Sizes(layers=12, width=256, hidden=1024, heads=4, length=256)
QUICK_TRANSFORMER = Sizes(layers=2, width=32, hidden=64, heads=2, length=16)
SEQUENCES = 8

STACK, QUICK_STACK = (16, 2048, 256), (2, 64, 8)
"""Layers, width and rows of the model that is calibrated and converted."""

STEP_NAMES = (
    contestants.FLOAT32,
    contestants.BFLOAT16,
    contestants.AQTP,
    contestants.QWIX_STOCHASTIC,
    contestants.AQTLITE,
)


def unrolled(contestant: Contestant, x: jax.Array, stacked: Any) -> jax.Array:
    """Unrolled residual blocks."""
    for index in range(BLOCKS):
        x = x + mlp.block(contestant, x, *(w[index] for w in stacked))
    return x


def scanned(contestant: Contestant, x: jax.Array, stacked: Any) -> jax.Array:
    """A scan over residual blocks, each rematerialized in the backward pass."""

    @jax.checkpoint
    def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + mlp.block(contestant, x, *weights), None

    return jax.lax.scan(body, x, stacked)[0]


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "no checkpoint": lambda body: body,
    "nothing_saveable": jax.checkpoint,
    **{
        name: functools.partial(jax.checkpoint, policy=policy)
        for name, policy in {
            "save_quantized()": remat.save_quantized(),
            "dots_with_no_batch_dims_saveable": (
                jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            ),
            "dots_saveable": jax.checkpoint_policies.dots_saveable,
        }.items()
    },
}
"""What the layers of the transformer save for the backward pass."""


def held_bytes(
    checkpoint: Callable[..., Any], contestant: Contestant, sizes: Sizes
) -> int:
    """Temporary memory and results of a step of `benchmarks.pods.model`.

    bfloat16 has bfloat16 activations and float32 weights; all others have float32.
    """
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in sizes.weights().items()
    }
    shape = SEQUENCES, sizes.length, sizes.width
    x = jax.ShapeDtypeStruct(shape, contestant.dtype)
    step = training_step(contestant, sizes, checkpoint)
    analysis: Any = jax.jit(step).lower(weights, x, x).compile().memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def temporary_bytes(
    model: Callable[..., jax.Array], contestant: Contestant, width: int, tokens: int
) -> int:
    """Temporary bytes of the compiled gradient with respect to the weights."""
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    stacked = (
        jax.ShapeDtypeStruct((BLOCKS, width, 4 * width), jnp.float32),
        jax.ShapeDtypeStruct((BLOCKS, 4 * width, width), jnp.float32),
    )

    def loss(stacked: Any, x: jax.Array) -> jax.Array:
        return jnp.square(model(contestant, x, stacked)).mean()

    compiled = jax.jit(jax.grad(loss)).lower(stacked, x).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


def saved_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that `jax.vjp` keeps for the backward pass, other than the arguments.

    >>> x = jnp.ones((4, 4))
    >>> saved_bytes(lambda x: x @ x, x)
    0
    >>> saved_bytes(lambda x: jnp.sin(x) @ x, x) # sin(x) and cos(x)
    128
    """
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(function, *a)[1]))(
        *arguments
    ).jaxpr
    saved = {v for v in jaxpr.outvars if isinstance(v, core.Var)} - {*jaxpr.invars}
    avals: list[Any] = [variable.aval for variable in saved]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def layers(contestant: Contestant, x: jax.Array, *kernels: jax.Array) -> jax.Array:
    """Stacked contractions; the first input is computed, so that it counts as saved."""
    x = x + 1.0
    for kernel in kernels:
        x = contestant.dot_general(x, kernel, (((1,), (0,)), ((), ())))
    return x


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """All figures, for each contestant."""
    width, tokens, saved_tokens = (
        (QUICK_WIDTH, QUICK_TOKENS, QUICK_SAVED_TOKENS)
        if options.quick
        else (WIDTH, TOKENS, SAVED_TOKENS)
    )
    compared = contestants.select(NAMES)
    x = jax.ShapeDtypeStruct((saved_tokens, width), jnp.float32)
    kernels = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS
    measured = []
    for name, model in (("unrolled", unrolled), ("checkpoint and scan", scanned)):
        what = f"temporary, {BLOCKS} blocks, {name}"
        report(what)
        values = {c.name: temporary_bytes(model, c, width, tokens) for c in compared}
        case = {"what": what, "width": width, "tokens": tokens}
        measured += figures.exact("memory", case, values, "bytes")
    sizes = QUICK_TRANSFORMER if options.quick else TRANSFORMER
    shown = contestants.select(STEP_NAMES)
    for name, checkpoint in CHECKPOINTS.items():
        what = f"step, {sizes.layers} layers, {name}"
        report(what)
        values = {c.name: held_bytes(checkpoint, c, sizes) for c in shown}
        case = {
            "what": what,
            "width": sizes.width,
            "tokens": SEQUENCES * sizes.length,
        }
        measured += figures.exact("memory", case, values, "bytes")
    sizes_of_stack = QUICK_STACK if options.quick else STACK
    for name, tasks in (("convert", peaks.CONVERT), ("calibrate", peaks.CALIBRATE)):
        depth, size, rows = sizes_of_stack
        what = f"peak of {name}, {depth} layers"
        report(what)
        values = {"the weights": depth * 4 * size * (size + 1)} | {
            contestant: peaks.grown(task, *sizes_of_stack)
            for contestant, task in tasks.items()
        }
        case = {"what": what, "width": size, "tokens": rows}
        measured += figures.exact("memory", case, values, "bytes")
    what = f"saved, {LAYERS} layers"
    report(what)
    values = {
        c.name: saved_bytes(lambda *a, c=c: layers(c, *a), x, *kernels)
        for c in compared
    }
    case = {"what": what, "width": width, "tokens": saved_tokens}
    return measured + figures.exact("memory", case, values, "bytes")

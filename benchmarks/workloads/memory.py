"""Memory of a training step, against float32 and aqtp.

    python -m benchmarks --only memory

- Temporary memory, reported by XLA, of the compiled training step of an MLP of 8
  blocks: unrolled, and as a scan over rematerialized blocks.
- Temporary memory of a scan with several `jax.checkpoint` policies, including
  `aqtlite.remat.save_quantized()`.
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
from benchmarks.workloads import mlp

BLOCKS, LAYERS = 8, 4
WIDTH, TOKENS, POLICY_TOKENS, SAVED_TOKENS = 256, 1024, 2048, 4096
QUICK_WIDTH, QUICK_TOKENS, QUICK_SAVED_TOKENS = 64, 64, 256

NAMES = (contestants.FLOAT32, contestants.AQTP, contestants.AQTLITE)


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


POLICIES: dict[str, Callable[..., Any] | None] = {
    "no checkpoint": None,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "save_quantized()": remat.save_quantized(),
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}


def layers_in_a_scan(
    policy: Callable[..., Any] | None,
    contestant: Contestant,
    x: jax.Array,
    stacked: Any,
) -> jax.Array:
    """A scan over MLPs with GELU; the policy keeps some activations, None keeps all."""
    dims = (((1,), (0,)), ((), ()))

    def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        hidden = jax.nn.gelu(contestant.dot_general(x, up, dims))
        return contestant.dot_general(hidden, down, dims), None

    if policy is not None:
        body = jax.checkpoint(body, policy=policy)
    return jax.lax.scan(body, x, stacked)[0]


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
    width, tokens, policy_tokens, saved_tokens = (
        (QUICK_WIDTH, QUICK_TOKENS, QUICK_TOKENS, QUICK_SAVED_TOKENS)
        if options.quick
        else (WIDTH, TOKENS, POLICY_TOKENS, SAVED_TOKENS)
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
    named = contestants.select((contestants.FLOAT32, contestants.AQTLITE))
    for name, policy in POLICIES.items():
        what = f"temporary, scan, {name}"
        report(what)
        model = functools.partial(layers_in_a_scan, policy)
        values = {
            c.name: temporary_bytes(model, c, width, policy_tokens) for c in named
        }
        case = {"what": what, "width": width, "tokens": policy_tokens}
        measured += figures.exact("memory", case, values, "bytes")
    what = f"saved, {LAYERS} layers"
    report(what)
    values = {
        c.name: saved_bytes(lambda *a, c=c: layers(c, *a), x, *kernels)
        for c in compared
    }
    case = {"what": what, "width": width, "tokens": saved_tokens}
    return measured + figures.exact("memory", case, values, "bytes")

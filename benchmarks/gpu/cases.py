"""The cases measured on a GPU and compiled for TPUs, in the order of importance.

Activations are bfloat16. Training casts float32 weights in the step; serving uses
weights in their stored dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import aqtlite
from aqtlite import config
from aqtlite.flax import convert
from aqtlite_demo.model import Transformer
from benchmarks.gpu import served
from benchmarks.gpu.measuring import Program
from benchmarks.harness import contestants, phases
from benchmarks.harness.contestants import (
    AQTLITE,
    AQTLITE_NEAREST,
    AQTP,
    AQTP_NEAREST,
    BFLOAT16,
    FLOAT32,
    QWIX_FP8,
    QWIX_NEAREST,
    QWIX_STOCHASTIC,
    RNG_STREAM,
    Contestant,
)
from benchmarks.workloads import attention, convolution, mlp

Cases = Iterator[tuple[Mapping[str, Any], Mapping[str, Program]]]

CAST_ONCE = f"{BFLOAT16}, weights too"


PRESETS = {
    f"{AQTLITE}, bfloat16 sums": served.bfloat16_sums(config.fully_quantized()),
    f"{AQTLITE}, fp8": config.fp8(per_tensor=True),
    f"{AQTLITE}, fp8, bfloat16 sums": served.bfloat16_sums(config.fp8(per_tensor=True)),
    f"{AQTLITE}, weight-only int8": config.weight_only(8),
    f"{AQTLITE}, weight-only int8, bfloat16 sums": served.bfloat16_sums(
        config.weight_only(8)
    ),
    f"{AQTLITE}, w4a8 in blocks of 128": config.update(
        config.w4a8(), {"fwd.rhs.blocks": config.Blocks(size=128)}
    ),
}


def products(*, quick: bool) -> Cases:
    """Bare products of square matrices: the peak of the device."""
    size = 64 if quick else 8192
    case = {"size": size}

    def dot(precision: lax.Precision | None, a: jax.Array, b: jax.Array) -> jax.Array:
        is_int = jnp.issubdtype(a.dtype, jnp.integer)
        wide = jnp.int32 if is_int else jnp.float32
        return lax.dot(a, b, precision=precision, preferred_element_type=wide)

    def program(dtype: Any, precision: lax.Precision | None = None) -> Program:
        operands = (
            (100 * jax.random.normal(jax.random.key(seed), (size, size))).astype(dtype)
            for seed in range(2)
        )
        return Program(functools.partial(dot, precision), tuple(operands))

    fp8, highest = jnp.float8_e4m3fn, lax.Precision.HIGHEST
    yield (
        case,
        {
            BFLOAT16: program(jnp.bfloat16),
            "int8": program(jnp.int8),
            "fp8, summed in float32": program(fp8, highest),
            "fp8, fast accumulation": program(fp8),
        },
    )


def training(*, quick: bool, phase: str) -> Cases:
    """An MLP block with the width of a large model."""
    width, tokens = (128, 32) if quick else (4096, 8192)
    ours, aqtp = (AQTLITE, AQTLITE_NEAREST), (AQTP, AQTP_NEAREST)
    names = BFLOAT16, *ours, *aqtp, QWIX_STOCHASTIC, QWIX_NEAREST, QWIX_FP8
    compared = _in_bfloat16(contestants.select(names))
    compared[3:3] = [
        Contestant(name, aqtlite.make_dot_general(cfg), None, jnp.bfloat16)
        for name, cfg in PRESETS.items()
    ]
    x = jax.random.normal(jax.random.key(2), (tokens, width), jnp.bfloat16)
    weights = mlp.weights(width)
    narrow = tuple(w.astype(jnp.bfloat16) for w in weights)

    programs = {c.name: _block(c, (x, *weights), phase) for c in compared}
    first, *others = programs.items()
    cast_once = (CAST_ONCE, _block(compared[0], (x, *narrow), phase))
    case = {"widths": f"{width}, {4 * width}", "tokens": tokens}
    yield case, dict([first, cast_once, *others])


def _in_bfloat16(compared: list[Contestant]) -> list[Contestant]:
    return [dataclasses.replace(c, dtype=jnp.bfloat16) for c in compared]


def _block(contestant: Contestant, arguments: tuple, phase: str) -> Program:
    def forward(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return mlp.block(contestant, x, w1, w2).astype(jnp.bfloat16)

    return _program(forward, arguments, phase)


def _program(
    forward: Callable[..., jax.Array], arguments: tuple, phase: str
) -> Program:
    if phase == phases.FORWARD:
        return Program(forward, arguments)
    out = jax.eval_shape(forward, *arguments)
    gradient = jax.random.normal(jax.random.key(7), out.shape, out.dtype)
    return Program(phases.forward_and_backward(forward), (gradient, *arguments))


def serving(*, quick: bool) -> Cases:
    """A stack of layers with frozen weights, larger than the cache."""
    layers, width, rows = (2, 64, (1, 4)) if quick else (8, 4096, (1, 64, 8192))
    compared = served.layers((width,) * (layers + 1))
    for count in rows:
        case = {"layers": f"{layers} of {width} x {width}", "rows": count}
        yield case, _served(compared, count, width)


def served_block(*, quick: bool) -> Cases:
    """The MLP block of `training`, with frozen weights."""
    width, tokens = (64, 16) if quick else (4096, 8192)
    compared = served.layers((width, 4 * width, width), jax.nn.relu)
    case = {"widths": f"{width}, {4 * width}", "tokens": tokens}
    yield case, _served(compared, tokens, width)


def _served(
    compared: Mapping[str, tuple[Callable, Any]], rows: int, width: int
) -> dict[str, Program]:
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    return {name: Program(run, (given, x)) for name, (run, given) in compared.items()}


def decoding(*, quick: bool) -> Cases:
    """One token of a transformer, at the start of the context."""
    layers, width, length = (1, 64, 16) if quick else (2, 2048, 512)
    model = Transformer(layers=layers, width=width, heads=width // 32, length=length)
    tokens = jnp.zeros((1, length), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables)
    compared = {BFLOAT16: (model, narrow), FLOAT32: (model, variables)}
    for name, cfg in served.CONFIGS.items():
        quantized = model.clone(cfg=cfg)
        compared[name] = quantized, convert(quantized, narrow, tokens)
    for batch in (1, 2) if quick else (1, 64):
        programs = {name: _decoding(*one, batch) for name, one in compared.items()}
        yield {"layers": layers, "width": width, "sequences": batch}, programs


def _decoding(model: Transformer, variables: Any, batch: int) -> Program:
    decoder = model.clone(decode=True)

    def apply(variables: Any, cache: Any, tokens: jax.Array) -> Any:
        given = variables if cache is None else {**variables, "cache": cache}
        return decoder.apply(given, tokens, mutable=["cache"])

    context = jnp.zeros((batch, model.length), jnp.int32)
    _, abstract = jax.eval_shape(apply, variables, None, context)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract["cache"])
    return Program(apply, (variables, cache, context[:, :1]))


def attention_block(*, quick: bool) -> Cases:
    """Training step of Flax's self-attention, with quantized projections."""
    width, heads, shape = (64, 4, (2, 16)) if quick else (4096, 32, (8, 1024))
    names = BFLOAT16, AQTLITE, AQTLITE_NEAREST, AQTP, QWIX_NEAREST
    compared = _in_bfloat16(contestants.select(names))
    key = jax.random.key(0)
    x = jax.random.normal(key, (*shape, width), jnp.bfloat16)
    params = attention.module(compared[0], heads).init(key, x)["params"]

    def forward(contestant: Contestant) -> Callable[..., jax.Array]:
        def apply(params: dict, x: jax.Array) -> jax.Array:
            module = attention.module(contestant, heads)
            return module.apply({"params": params}, x, rngs={RNG_STREAM: key})

        return apply

    case = {"width": width, "tokens": f"{shape[0]} x {shape[1]}"}
    yield (
        case,
        {c.name: _program(forward(c), (params, x), phases.BOTH) for c in compared},
    )


def convolutions(*, quick: bool) -> Cases:
    """A 3 x 3 convolution, forward and forward + backward."""
    x, kernel = (
        ((2, 8, 8, 4), (3, 3, 4, 8)) if quick else ((64, 56, 56, 256), (3, 3, 256, 256))
    )
    case = convolution.Case("3 x 3", x, kernel)
    operands = (
        jax.random.normal(jax.random.key(0), x, jnp.bfloat16),
        jax.random.normal(jax.random.key(1), kernel, jnp.bfloat16),
    )
    for phase in phases.PHASES:
        compared = {BFLOAT16: lax.conv_general_dilated} | {
            name: make()
            for name, make in convolution.CONVOLUTIONS.items()
            if name != FLOAT32
            and (phase == phases.FORWARD or convolution.has_gradient(name, case))
        }
        programs = {
            name: _program(_convolution(conv, case), operands, phase)
            for name, conv in compared.items()
        }
        sizes = " x ".join(map(str, (*x, kernel[-1])))
        yield {"convolution": f"{case.name}, {sizes}", "pass": phase}, programs


def _convolution(
    conv: convolution.Conv, case: convolution.Case
) -> Callable[..., jax.Array]:
    forward = convolution.forward(conv, case)
    return lambda x, kernel: forward(x, kernel).astype(jnp.bfloat16)


def blocks(*, quick: bool) -> Cases:
    """A step of gradient descent of four MLP blocks, with residual connections."""
    count, width, tokens = (2, 64, 16) if quick else (4, 2048, 8192)
    names = BFLOAT16, AQTLITE, AQTP, QWIX_STOCHASTIC, QWIX_FP8
    compared = _in_bfloat16(contestants.select(names))
    compared[2:2] = [
        Contestant(name, aqtlite.make_dot_general(cfg), None, jnp.bfloat16)
        for name, cfg in PRESETS.items()
        if cfg.fwd.rhs.blocks is None
    ]
    x = jnp.zeros((tokens, width), jnp.bfloat16)
    weights = (mlp.weights(width),) * count
    case = {"blocks": count, "widths": f"{width}, {4 * width}", "tokens": tokens}
    yield (
        case,
        {c.name: Program(_descent(c), (weights, x), donated=(0,)) for c in compared},
    )


def _descent(contestant: Contestant) -> Callable[[Any, jax.Array], Any]:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for up, down in weights:
            x += mlp.block(contestant, x, up, down).astype(x.dtype)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)

    return step


CASES: tuple[tuple[str, Callable[..., Cases]], ...] = (
    ("products", products),
    ("training step", functools.partial(training, phase=phases.BOTH)),
    ("serving", serving),
    ("served block", served_block),
    ("forward", functools.partial(training, phase=phases.FORWARD)),
    ("decoding", decoding),
    ("attention", attention_block),
    ("convolution", convolutions),
)
"""Names of the cases, and functions that yield parameters and programs."""

COMPILED = (*CASES, ("blocks", blocks))
"""`CASES`, and those that are only compiled."""

"""What bits that depend on values alone cost: a training step, decoding, compilation.

    python -m benchmarks.invariance_cost [--width 128 1024] [--dtype float32] [--each]

A decoder in int8 as it is, in invariant forms, and with one protection left out. Times
are medians of the ratios to the decoder as it is, of runs that alternate, as are those
of compilation, from the trace on, in processor time.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import rich

import aqtlite
from aqtlite import Rule, config
from aqtlite.invariance import rules as forms

PROTECTIONS: Mapping[str, frozenset[str]] = {
    "sums": frozenset({"reduce_sum", "cumsum"}),
    "functions": frozenset({"exp", "log", "log1p", "logistic", "tanh", "pow"})
    | {"sin", "cos", "erf"},
    "products and sums": frozenset({"mul", "square", "integer_pow", "add", "add_any"})
    | {"sub"},
    "quotients and roots": frozenset({"div", "sqrt", "rsqrt"}),
    "roundings": frozenset({"convert_element_type"}),
    "float contractions": frozenset(
        {"dot_general", "conv_general_dilated", "ragged_dot_general"}
    ),
}
"""Primitives that each protection replaces."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder and of its inputs."""

    width: int
    layers: int = 2
    heads: int = 8
    vocabulary: int = 512
    batch: int = 4
    length: int = 64
    cached: int = 128
    dtype: str = "float32"


def parameters(sizes: Sizes) -> Any:
    """Random parameters."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, sizes.dtype)

    width = sizes.width

    def layer() -> dict[str, jax.Array]:
        square = {name: weight(width, width) for name in ("q", "k", "v", "o")}
        wide = {name: weight(width, 4 * width) for name in ("gate", "up")}
        norm = jnp.ones((width,), sizes.dtype)
        return {**square, **wide, "down": weight(4 * width, width), "norm": norm}

    return {
        "table": weight(sizes.vocabulary, width),
        "layers": [layer() for _ in range(sizes.layers)],
        "head": weight(width, sizes.vocabulary),
    }


def apply(
    sizes: Sizes, params: Any, tokens: jax.Array, start: Any = 0, kept: Any = None
) -> Any:
    """Log-probabilities of the next tokens, and the keys and values of all."""
    slots = start + jnp.arange(tokens.shape[1])
    x, after = params["table"][tokens], []
    for number, layer in enumerate(params["layers"]):
        h = _norm(x, layer["norm"])
        q, k, v = (
            (h @ layer[name]).reshape(*h.shape[:2], sizes.heads, -1) for name in "qkv"
        )
        q, k = _rope(q, slots), _rope(k, slots)
        if kept is not None:
            k, v = (
                jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0))
                for old, new in zip(kept[number], (k, v), strict=True)
            )
        after.append((k, v))
        mask = jnp.arange(k.shape[1]) <= slots[:, None]
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        out = jnp.einsum("bhts,bshd->bthd", weights, v)
        x = x + out.reshape(x.shape) @ layer["o"]
        h = _norm(x, layer["norm"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    logits = (_norm(x, params["layers"][0]["norm"]) @ params["head"]).astype("float32")
    return jax.nn.log_softmax(logits), after


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype("float32")
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale * gain).astype(x.dtype)


def _rope(x: jax.Array, slots: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = slots[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


def quantized(sizes: Sizes) -> Callable[..., Any]:
    """The decoder in int8."""
    rules = Rule(cfg=config.fully_quantized())
    return aqtlite.quantize_function(functools.partial(apply, sizes), rules, params=0)


def training_step(sizes: Sizes, params: Any, tokens: jax.Array) -> Any:
    """The parameters after a step of gradient descent."""

    def loss(params: Any) -> jax.Array:
        found, _ = quantized(sizes)(params, tokens)
        chosen = jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], 2)
        return -chosen.mean()

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda x, g: x - 0.01 * g, params, gradients)


def programs(sizes: Sizes) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A training step and a decoding step, with their arguments."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes.vocabulary, (sizes.batch, sizes.length))
    shape = (sizes.batch, sizes.cached, sizes.heads, sizes.width // sizes.heads)
    kept = [(jnp.zeros(shape, sizes.dtype),) * 2] * sizes.layers
    params = parameters(sizes)
    decode = params, tokens[:, :1], np.int32(sizes.length), kept
    return {
        "training step": (functools.partial(training_step, sizes), (params, tokens)),
        "decoding step": (quantized(sizes), decode),
    }


def compiled(function: Callable[..., Any], arguments: Any, left_out: str | None) -> Any:
    """A compiled program in invariant forms, and the processor seconds that this took.

    Args:
        function: the function.
        arguments: its arguments.
        left_out: a protection to leave out; "all" for the program as it is; None for
            none.
    """
    if left_out != "all":
        function = aqtlite.invariant(function)
    original = forms.rule_of
    without = PROTECTIONS.get(left_out or "", frozenset())

    def rule_of(eqn: Any) -> Any:
        return None if eqn.primitive.name in without else original(eqn)

    start = time.process_time()
    with mock.patch.object(forms, "rule_of", rule_of):
        # JAX knows the program of a function that it has seen.
        new = functools.partial(function)
        program = jax.jit(new).lower(*arguments).compile()
    return program, time.process_time() - start


def ratios(
    programs: Mapping[str | None, Any], arguments: Any, seconds: float
) -> dict[str | None, float]:
    """Median ratios of the times of programs to that of the first, alternating."""
    samples: dict[Any, list[float]] = {name: [] for name in programs}
    end = time.perf_counter() + seconds
    for number in itertools.count():
        if number > 5 and time.perf_counter() > end:
            break
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            samples[name].append(time.perf_counter() - start)
    base = np.array(next(iter(samples.values())))[1:]
    return {
        name: float(np.median(np.array(taken)[1:] / base))
        for name, taken in samples.items()
    }


def measure(
    sizes: Sizes,
    *,
    protections: Sequence[str] = (),
    seconds: float = 20,
    compilations: int = 9,
) -> list[tuple[str, ...]]:
    """Rows of a table: program, protection left out, ratios of time and compilation.

    Args:
        sizes: sizes of the decoder.
        protections: names of `PROTECTIONS`, to leave out one at a time.
        seconds: time for the runs of a program.
        compilations: number of times that each is compiled.
    """
    rows: list[tuple[str, ...]] = []
    kinds = ("all", None, *protections)
    for name, (function, arguments) in programs(sizes).items():
        made = [
            {one: compiled(function, arguments, one) for one in kinds}
            for _ in range(compilations)
        ]
        last = {one: program for one, (program, _) in made[-1].items()}
        for one, ratio in ratios(last, arguments, seconds).items():
            compilation = np.median([turn[one][1] / turn["all"][1] for turn in made])
            left = {"all": "as it is", None: "invariant"}.get(one, f"without {one}")
            rows.append((name, left, f"{ratio:.2f}", f"{compilation:.2f}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--compilations", type=int, default=9)
    parser.add_argument(
        "--each", action="store_true", help="leave out one protection at a time"
    )
    asked = parser.parse_args(arguments)
    for width in asked.width:
        rich.print(f"width {width}, {asked.dtype}: program, forms, time, compilation")
        protections = tuple(PROTECTIONS) if asked.each else ()
        sizes = Sizes(width, dtype=asked.dtype)
        for row in measure(
            sizes,
            protections=protections,
            seconds=asked.seconds,
            compilations=asked.compilations,
        ):
            rich.print("  " + "  ".join(row))


if __name__ == "__main__":
    main()

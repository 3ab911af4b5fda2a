"""KV caches of 8, 4 and 3 bits, rotated or not: loss, bytes, and time of a step.

    python -m benchmarks.kv_caches

- error: relative error of attention with two channels of a head ten times as large as
  the others, in keys and values (root of the sum of squares);
- loss: of the demo's model after `--steps` steps on held-out text, fed position by
  position through the cache, less that of a float cache, in nats;
- bytes: of a cache, relative to float32's;
- time: of one position written and attended to, at the end of a cache of 8 heads of
  64 channels. Alternatives take turns, and the medians of the ratios to int8 are shown.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, kv_cache, numerics
from aqtlite_demo.model import Transformer
from benchmarks.workloads import kv_cache as decoding

FLOAT, BASE = "float32", "int8"


def with_bits(bits: int, **fwd: Any) -> config.DotGeneral:
    """A config of a cache, with 8 bits for queries and probabilities."""
    changes = {"rhs.numerics": numerics.IntSymmetric(bits=bits)} | fwd
    named = {f"fwd.{name.replace('__', '.')}": value for name, value in changes.items()}
    return config.update(config.qat(8), named)


GROUPS = config.Blocks(size=32, fit=True)
CACHES: Mapping[str, config.DotGeneral | None] = {
    FLOAT: None,
    BASE: with_bits(8),
    "int4": with_bits(4),
    "int4, groups of 32": with_bits(4, rhs__blocks=GROUPS),
    "int4, rotated": kv_cache.config_for(4),
    "int4, rotated, groups of 32": with_bits(
        4, rotation=config.Hadamard(), rhs__blocks=GROUPS
    ),
    "int3": with_bits(3),
    "int3, rotated": kv_cache.config_for(3),
}


def errors(length: int = 128, heads: int = 4, depth: int = 64) -> dict[str, float]:
    """Relative error of causal attention with outlier channels, by cache."""
    rng = np.random.default_rng(0)
    large = np.ones((heads, depth))
    for head in range(heads):
        large[head, rng.choice(depth, 2, replace=False)] = 10
    shape = (1, length, heads, depth)
    query, key, value = (
        jnp.asarray(rng.normal(size=shape) * factor, jnp.float32)
        for factor in (1, large, large)
    )
    mask = np.tril(np.ones((length, length), bool))
    wanted = nn.dot_product_attention(query, key, value, mask=mask)

    def error(cfg: config.DotGeneral | None) -> float:
        if cfg is None:
            return 0.0
        got = kv_cache.attend_uncached(query, key, value, cfg, mask)
        return float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))

    return {name: error(cfg) for name, cfg in CACHES.items()}


def losses(model: Transformer, steps: int, batches: int = 8) -> dict[str, float]:
    """Loss of the demo's trained model by cache, in nats per byte."""
    decoders = {
        name: model.clone(decode=True, cache=cfg) for name, cfg in CACHES.items()
    }
    return decoding.losses(model, steps, decoders, batches)


def bytes_of(length: int, heads: int = 8, depth: int = 64) -> dict[str, int]:
    """Bytes of a cache of one sequence, by cache."""
    found = {}
    for name, cfg in CACHES.items():
        made = jax.eval_shape(functools.partial(_empty, cfg, length, heads, depth))
        leaves = jax.tree.leaves(made)
        found[name] = sum(x.size * x.dtype.itemsize for x in leaves)
    return found


def times(
    length: int, rounds: int, heads: int = 8, depth: int = 64
) -> dict[str, tuple[float, float]]:
    """Seconds of a step at the end of a cache, and the ratio to int8's, by cache."""
    calls = {name: _step(cfg, length, heads, depth) for name, cfg in CACHES.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    base = np.array(taken[BASE])
    return {
        name: (float(np.median(one)), float(np.median(np.array(one) / base)))
        for name, one in taken.items()
    }


def _empty(cfg: config.DotGeneral | None, length: int, heads: int, depth: int) -> Any:
    shape = (1, length, heads, depth)
    if cfg is None:
        return jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((), jnp.int32)
    return kv_cache.empty(shape, jnp.float32, cfg)


def _step(
    cfg: config.DotGeneral | None, length: int, heads: int, depth: int
) -> Callable[[], None]:
    """A step at the last position, which donates the cache, and takes it back."""

    @functools.partial(jax.jit, donate_argnums=0)
    def in_float(cache: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        keys, values, index = cache
        starts = (0, index, 0, 0)
        keys = jax.lax.dynamic_update_slice(keys, x, starts)
        values = jax.lax.dynamic_update_slice(values, x, starts)
        mask = jnp.arange(length) <= index
        out = nn.dot_product_attention(x, keys, values, mask=mask)
        return (keys, values, index), out

    @functools.partial(jax.jit, donate_argnums=0)
    def quantized(cache: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        cache = kv_cache.append(cache, x, x, cfg)
        out = kv_cache.attend(x, cache, cfg)
        return dataclasses.replace(cache, index=cache.index - 1), out

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 1, heads, depth)), jnp.float32)
    cache = _empty(cfg, length, heads, depth)
    if cfg is None:
        cache = (*cache[:2], jnp.int32(length - 1))
    else:
        past = jnp.asarray(rng.normal(size=(1, length - 1, heads, depth)), jnp.float32)
        cache = jax.tree.map(jnp.asarray, kv_cache.append(cache, past, past, cfg))
    run = in_float if cfg is None else quantized

    def call() -> None:
        nonlocal cache
        cache, out = run(cache, x)
        jax.block_until_ready(out)

    return call


def table(
    steps: int, lengths: Sequence[int], rounds: int, model: Transformer
) -> list[list[str]]:
    """Rows of the table, the first with the names of the columns."""
    of_error, of_loss = errors(), losses(model, steps)
    of_bytes = bytes_of(max(lengths))
    of_times = {length: times(length, rounds) for length in lengths}
    columns = [f"time at {length:,}, ms (x int8)" for length in lengths]
    rows = [["cache", "error", "loss, + nats", "bytes, x", *columns]]
    for name in CACHES:
        cells = [f"{of_error[name]:.3f}", f"{of_loss[name] - of_loss[FLOAT]:+.4f}"]
        cells.append(f"{of_bytes[name] / of_bytes[FLOAT]:.3f}")
        for taken in of_times.values():
            seconds, ratio = taken[name]
            cells.append(f"{1e3 * seconds:.2f} ({ratio:.2f})")
        rows.append([name, *cells])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=decoding.STEPS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args(argv)
    model = decoding.QUICK_TRAINED if options.quick else decoding.TRAINED
    first, *rest = table(options.steps, options.lengths, options.rounds, model)
    for row in (first, ["---"] * len(first), *rest):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()

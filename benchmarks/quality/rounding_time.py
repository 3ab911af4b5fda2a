"""Time and memory of GPTQ for one matrix, beside NumPy and Qwix.

    python -m benchmarks.quality.rounding_time [--size N] [--methods NAME ...]

Rounds N x N weights (default 4096) to 4 bits with a scale for each 128 inputs, each
method in a process of its own, from the second moments of 2 N inputs. Prints processor
time, compilation included, the memory beyond that of the weights and the second
moments, and the error of the outputs for other inputs, relative to them.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import calibration, config, numerics
from benchmarks.harness import arguments as arguments_lib

SIZE = 128
"""Inputs that share a scale."""

BOUND = 7.5
"""Multiple of the scale onto which the largest magnitude is mapped."""


def inputs(size: int, rows: int, seed: int) -> np.ndarray:
    """Correlated inputs, of the same distribution for every seed."""
    mixture = np.random.default_rng(0).standard_normal((size, size)) / np.sqrt(size)
    x = np.random.default_rng(seed).standard_normal((rows, size), np.float32)
    return x + x @ mixture.astype(np.float32)


def with_aqtlite(weights: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Returns the weights rounded by a conversion of this library."""
    changes = {
        "fwd.rhs.numerics": numerics.IntSymmetric(bits=4),
        "fwd.rhs.calibration": calibration.AbsMax(),
        "fwd.rhs.blocks": config.Blocks(size=min(SIZE, len(weights))),
    }
    cfg = config.update(config.gptq(4), changes)
    w, x = jnp.asarray(weights), jnp.zeros((1, len(weights)), jnp.float32)
    dims = (((1,), (0,)), ((), ()))
    fn = aqtlite.quantize_function(lambda w, x: jnp.dot(x, w), cfg, params=0)
    found = aqtlite.statistics.init_states(cfg, x, w, dims).moment
    of_inputs = type(found)(found.batches + 1, jnp.asarray(moment)[None])

    def is_moment(one: object) -> bool:
        return isinstance(one, type(found))

    state = jax.tree.map(lambda _: of_inputs, fn.init_state(w, x), is_leaf=is_moment)
    _, serving = aqtlite.convert_function(fn, w, x, state=state)
    leaves = jax.tree.leaves(
        serving, is_leaf=lambda one: isinstance(one, aqtlite.QTensor)
    )
    (q,) = (one for one in leaves if isinstance(one, aqtlite.QTensor))
    return np.asarray(q.dequant())


def with_numpy(weights: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Returns the weights rounded as the paper does, in float64."""
    w, h = weights.astype(np.float64), moment.astype(np.float64)
    count, size = len(w), min(SIZE, len(w))
    largest = np.abs(w).reshape(-1, size, w.shape[1]).max(1)
    scale = (largest / BOUND).repeat(size, 0)
    order = np.argsort(-np.diag(h), kind="stable")
    h = h + 0.01 * np.diag(h).mean() * np.eye(count)
    u = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T
    w, scale, rounded = w[order], scale[order], np.empty_like(w)
    for start in range(0, count, SIZE):
        end = min(start + SIZE, count)
        errors = np.empty((end - start, w.shape[1]))
        for i in range(start, end):
            rounded[i] = np.clip(np.round(w[i] / scale[i]), -7, 7) * scale[i]
            errors[i - start] = (w[i] - rounded[i]) / u[i, i]
            w[i + 1 : end] -= np.outer(u[i, i + 1 : end], errors[i - start])
        w[end:] -= u[start:end, end:].T @ errors
    result = np.empty_like(rounded)
    result[order] = rounded
    return result


def with_qwix(weights: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Returns the weights rounded by Qwix."""
    from qwix._src.core import qarray
    from qwix.contrib import gptq_core

    how = qarray.HowToQuantize(
        qtype="int4", channelwise_axes=[0], tiled_axes={1: min(SIZE, len(weights))}
    )
    rows, moment = jnp.asarray(weights).T, jnp.asarray(moment)
    found, _ = gptq_core.quantize_weight(rows, moment, how)
    return np.asarray(qarray.dequantize(found)).T


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "aqtlite": with_aqtlite,
    "NumPy, float64": with_numpy,
    "Qwix": with_qwix,
}


def measured(name: str, size: int) -> dict[str, float]:
    """Rounds with a method in this process: seconds, bytes and relative error."""
    x, held_out = inputs(size, 2 * size, 1), inputs(size, 512, 2)
    weights = np.random.default_rng(3).standard_normal((size, size), np.float32) * 0.02
    moment = x.T @ x
    del x
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    rounded = METHODS[name](weights, moment)
    seconds = time.process_time() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    error = np.linalg.norm(held_out @ (rounded - weights))
    return {
        "seconds": seconds,
        "bytes": (after.ru_maxrss - before.ru_maxrss) * 1024,
        "error": float(error / np.linalg.norm(held_out @ weights)),
    }


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.rounding_time",
        description=__doc__.splitlines()[0],
    )
    result.add_argument("--size", type=arguments_lib.positive, default=4096)
    result.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    result.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each method in a process of its own, and prints a table."""
    asked = parser().parse_args(arguments)
    if asked.here:
        print(json.dumps(measured(asked.methods[0], asked.size)))
        return
    print("| | processor time, s | memory, GiB | error |")
    print("| --- | ---: | ---: | ---: |")
    for name in asked.methods:
        command = [sys.executable, "-m", __spec__.name, "--here"]
        command += ["--methods", name, "--size", str(asked.size)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(run.stdout.splitlines()[-1])
        cells = f"{found['seconds']:.1f} | {found['bytes'] / 2**30:.2f}"
        print(f"| {name} | {cells} | {100 * found['error']:.2f} % |", flush=True)


if __name__ == "__main__":
    main()

"""An MLP block forward and forward + backward, beside float and the peers.

    python -m benchmarks.mlp [--width 1024] [--json FILE]

Two layers, width -> 4 width -> relu -> width, on 1024 tokens, as a 2-D and a 3-D input;
medians in milliseconds, the contestants in turn in one process, with glibc told to keep
its memory (see `benchmarks.allocator`). Needs the `test` extra.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks import allocator

TOKENS = 1024


def contestants() -> dict[str, Callable[..., Any]]:
    """Functions ``(x, w1, w2) -> out``."""
    import jax
    from aqt.jax.v2 import config as aqt_config
    from qwix._src.core import dot_general_qt as qwix_qt

    import aqtlite
    from aqtlite import config

    def block(dot: Callable[..., Any], x: Any, w1: Any, w2: Any) -> Any:
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return dot(jax.nn.relu(dot(x, w1, dims)), w2, dims)

    def bfloat16(x: Any, w1: Any, w2: Any) -> Any:
        cast = (a.astype("bfloat16") for a in (x, w1, w2))
        return block(jax.lax.dot_general, *cast).astype("float32")

    # aqtp's configs hold the key of their noise, and are callable.
    aqtp = aqt_config.set_context(
        aqt_config.fully_quantized(), jax.random.key(0), train_step=None
    )
    nearest = aqt_config.fully_quantized(use_stochastic_rounding=False)
    qwix = qwix_qt.DotGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    ours = config.fully_quantized()
    return {
        "float32": functools.partial(block, jax.lax.dot_general),
        "bfloat16": bfloat16,
        "aqtp": functools.partial(block, aqtp),
        "aqtp, nearest rounding": functools.partial(block, nearest),
        "qwix, nearest rounding": functools.partial(
            block, lambda lhs, rhs, dims: qwix_qt.dot_general_qt(lhs, rhs, dims, qwix)
        ),
        "aqtlite": functools.partial(block, aqtlite.make_dot_general(ours)),
    }


def measure(width: int, shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Milliseconds forward and forward + backward, for each contestant."""
    import jax
    import numpy as np

    keys = jax.random.split(jax.random.key(1), 4)
    x = jax.random.normal(keys[0], shape)
    w1 = jax.random.normal(keys[1], (width, 4 * width)) / width**0.5
    w2 = jax.random.normal(keys[2], (4 * width, width)) / (4 * width) ** 0.5
    g = jax.random.normal(keys[3], shape)

    def step(forward: Callable[..., Any], x: Any, w1: Any, w2: Any, g: Any) -> Any:
        out, vjp = jax.vjp(forward, x, w1, w2)
        return out, vjp(g)

    programs = {}
    for name, forward in contestants().items():
        programs[name, "forward"] = jax.jit(forward), (x, w1, w2)
        both = jax.jit(functools.partial(step, forward))
        programs[name, "forward + backward"] = both, (x, w1, w2, g)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
    for program, arguments in programs.values():
        jax.block_until_ready(program(*arguments))
    for _ in range(repeats):
        for key, (program, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[key].append(time.perf_counter() - start)
    result: dict[str, Any] = {}
    for (name, what), taken in times.items():
        result.setdefault(name, {})[what] = float(np.median(taken)) * 1e3
    return result


def main() -> None:
    """Prints a table for each input, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    allocator.keep_memory("benchmarks.mlp")

    from rich.console import Console
    from rich.table import Table

    figures = {}
    for shape in ((TOKENS, options.width), (8, TOKENS // 8, options.width)):
        figures[str(shape)] = measure(options.width, shape, options.repeats)
        table = Table(f"input {shape}", "forward", "forward + backward", "of float32")
        base = figures[str(shape)]["float32"]["forward + backward"]
        for name, row in figures[str(shape)].items():
            forward, both = row["forward"], row["forward + backward"]
            table.add_row(name, f"{forward:.1f}", f"{both:.1f}", f"{both / base:.2f} x")
        Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()

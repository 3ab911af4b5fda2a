"""Error of int8 contractions and their gradients against float, beside the peers.

    python -m benchmarks.errors

Relative error (Frobenius norm) of the output, of dlhs and of drhs, mean of several
draws, nearest rounding, 8 bits everywhere. Needs the `test` extra, which installs
aqtp and qwix.
"""

import argparse

import jax
import jax.numpy as jnp
from aqt.jax.v2 import config as aqt_config
from qwix._src.core import dot_general_qt as qwix_qt
from rich.console import Console
from rich.table import Table

import aqtlite
from aqtlite import config

DIMS = (((1,), (0,)), ((), ()))


def draw(kind: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of Gaussian values, or of Student's t with 3 degrees of freedom."""
    if kind == "gaussian":
        return jax.random.normal(key, shape)
    return jax.random.t(key, 3.0, shape)


def contestants() -> dict:
    """Functions ``(lhs, rhs) -> out`` with quantized gradients."""
    ours = aqtlite.make_dot_general(
        config.fully_quantized(use_stochastic_rounding=False)
    )
    aqtp = aqt_config.fully_quantized(use_stochastic_rounding=False)
    qwix = qwix_qt.DotGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    return {
        "aqtlite": lambda x, w: ours(x, w, DIMS),
        "aqtp": lambda x, w: aqtp(x, w, DIMS),
        "qwix": lambda x, w: qwix_qt.dot_general_qt(x, w, DIMS, qwix),
    }


def relative_error(value: jax.Array, exact: jax.Array) -> jax.Array:
    """``|value - exact| / |exact|`` in the Frobenius norm."""
    return jnp.linalg.norm(value - exact) / jnp.linalg.norm(exact)


def errors(dot, kind: str, key: jax.Array, draws: int) -> jax.Array:
    """Mean relative error of the output, of dlhs and of drhs."""

    def one(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        x = draw(kind, keys[0], (256, 512))
        w = draw(kind, keys[1], (512, 128))
        g = draw(kind, keys[2], (256, 128))
        out, vjp = jax.vjp(dot, x, w)
        exact, exact_vjp = jax.vjp(jnp.matmul, x, w)
        pairs = zip((out, *vjp(g)), (exact, *exact_vjp(g)), strict=True)
        return jnp.stack([relative_error(value, ref) for value, ref in pairs])

    one = jax.jit(one)
    return jnp.stack([one(k) for k in jax.random.split(key, draws)]).mean(axis=0)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10)
    draws = parser.parse_args().draws
    table = Table("data", "library", "output", "dlhs", "drhs")
    for kind in ("gaussian", "heavy-tailed"):
        for name, dot in contestants().items():
            row = errors(dot, kind, jax.random.key(0), draws)
            table.add_row(kind, name, *(f"{value:.5f}" for value in row.tolist()))
    Console().print(table)


if __name__ == "__main__":
    main()

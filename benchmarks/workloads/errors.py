"""Errors of int8 contractions and gradients relative to float, against the peers.

    python -m benchmarks --only errors

Relative errors (Frobenius norm) of the output, dlhs and drhs, as the mean of several
draws, with rounding to nearest and 8 bits everywhere.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.harness import contestants, figures
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

DIMS = (((1,), (0,)), ((), ()))
KINDS = ("gaussian", "heavy-tailed")
RESULTS = ("output", "dlhs", "drhs")
DRAWS = 10


def draw(kind: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gaussian samples, or samples of Student's t with 3 degrees of freedom."""
    if kind == "gaussian":
        return jax.random.normal(key, shape)
    return jax.random.t(key, 3.0, shape)


def dots() -> dict[str, Callable[..., jax.Array]]:
    """Contractions ``(lhs, rhs) -> out`` with quantized gradients, by contestant."""
    names = (
        contestants.AQTLITE_NEAREST,
        contestants.AQTP_NEAREST,
        contestants.QWIX_NEAREST,
    )
    return {
        c.name: lambda x, w, dot=c.dot_general: dot(x, w, DIMS)
        for c in contestants.select(names)
    }


def relative_error(value: jax.Array, exact: jax.Array) -> jax.Array:
    """``|value - exact| / |exact|`` in the Frobenius norm."""
    return jnp.linalg.norm(value - exact) / jnp.linalg.norm(exact)


def errors(
    dot: Callable[..., jax.Array], kind: str, key: jax.Array, draws: int
) -> jax.Array:
    """Mean relative errors of the output, dlhs and drhs."""

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


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Both distributions; errors have no spread."""
    measured = []
    for kind in KINDS[:1] if options.quick else KINDS:
        report(kind)
        rows = {
            name: errors(dot, kind, jax.random.key(0), 1 if options.quick else DRAWS)
            for name, dot in dots().items()
        }
        for index, what in enumerate(RESULTS):
            values = {name: float(row[index]) for name, row in rows.items()}
            case = {"data": kind, "result": what}
            measured += figures.exact("errors", case, values, "relative error")
    return measured

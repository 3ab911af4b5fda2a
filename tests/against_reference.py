"""Compares random contractions with the reference.

``python -m tests.against_reference`` runs as many as are wanted. Every failure is
printed with the seed that repeats it:
``python -m tests.against_reference --seed SEED --count 1``.
"""

import argparse
import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

import aqtlite
from tests import generators, reference
from tests.progress import shown

NAMES = ("out", "dlhs", "drhs")
_CLEAR_CACHES_EVERY = 100

Program = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a case got wrong."""

    case: generators.Case
    what: str  # "out", "dlhs", "drhs" or the name of an exception
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}\n{self.case}"


def program(case: generators.Case) -> Program:
    """Output and both gradients as the library computes them, for any draw."""
    dot = aqtlite.make_dot_general(case.cfg)

    def run(lhs, rhs, g, key):
        contract = functools.partial(
            dot,
            dimension_numbers=case.dims,
            preferred_element_type=case.preferred_element_type,
            key=key,
        )
        out, vjp = jax.vjp(contract, lhs, rhs)
        return out, *vjp(g)

    return jax.jit(run) if case.is_jitted else run


def failures(run: Program, case: generators.Case) -> list[Failure]:
    """How the library differs from the reference beyond its bounds."""
    arrays = (jnp.asarray(x) for x in (case.lhs, case.rhs, case.g))
    key = jax.random.key(case.draw) if case.has_key else None
    try:
        got = [np.asarray(x) for x in run(*arrays, key)]
    except (ValueError, TypeError, RuntimeError) as error:
        return [Failure(case, type(error).__name__, str(error)[:300])]
    wanted = reference.run(case.cfg, case.lhs, case.rhs, case.g, case.dims)
    dtypes = case.g.dtype, case.lhs.dtype, case.rhs.dtype
    found = []
    for name, one, interval, dtype in zip(NAMES, got, wanted, dtypes, strict=True):
        detail = difference(one, interval, dtype)
        if detail:
            found.append(Failure(case, name, detail))
    return found


def difference(
    got: np.ndarray, interval: reference.Interval, dtype: np.dtype
) -> str | None:
    """What lies outside its interval, or None."""
    if got.dtype != dtype or got.shape != interval.center.shape:
        return (
            f"{got.dtype.name}{got.shape} instead of "
            f"{dtype.name}{interval.center.shape}"
        )
    with np.errstate(all="ignore"):
        low, high = interval.ends(dtype)
    values = got.astype(np.float64)
    undefined = np.isnan(low) | np.isnan(high)
    within = np.where(undefined, np.isnan(values), (low <= values) & (values <= high))
    if within.all():
        return None
    wrong = np.argwhere(~within)
    at = tuple(int(i) for i in wrong[0])
    return (
        f"{len(wrong)} of {got.size} elements; at {at} {values[at]!r} is not from "
        f"{low[at]!r} to {high[at]!r}"
    )


def failures_of(seed: int, draws: int) -> list[Failure]:
    """The failures in all draws of a seed's contraction."""
    run = program(generators.case(seed))
    cases = (generators.case(seed, draw) for draw in range(draws))
    return [failure for case in cases for failure in failures(run, case)]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.against_reference",
        description="Compares random contractions with the reference.",
    )
    parser.add_argument("--count", type=int, default=5000, help="how many contractions")
    parser.add_argument("--draws", type=int, default=5, help="of them per program")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    console = rich.console.Console()
    found: list[Failure] = []
    programs = -(-options.count // options.draws)
    start = time.perf_counter()
    with shown(console, programs) as on_done:
        for done in range(programs):
            if done % _CLEAR_CACHES_EVERY == _CLEAR_CACHES_EVERY - 1:
                jax.clear_caches()
            new = failures_of(options.seed + done, options.draws)
            for failure in new[:1]:
                console.print(str(failure), soft_wrap=True, highlight=False)
            found += new
            on_done(f"{len({failure.case.seed for failure in found})} fail")
    seconds = time.perf_counter() - start
    seeds = sorted({failure.case.seed for failure in found})
    console.print(
        f"{len({(f.case.seed, f.case.draw) for f in found})} of "
        f"{programs * options.draws} contractions fail, in {len(seeds)} of {programs} "
        f"programs, {seconds:.0f} s"
    )
    for what, count in collections.Counter(f.what for f in found).items():
        console.print(f"  {what}: {count}")
    console.print(f"  seeds: {seeds}", soft_wrap=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

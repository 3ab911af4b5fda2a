"""Integer contractions, bare and as lowered by aqtlite, against float32.

    python -m benchmarks --only contractions

Float32, a bare int8 `lax.dot_general`, and `aqtlite.lowering.Integers` on the same
operands; the results of the last two are compared element by element. ``MK,KN`` names
the axes of lhs and rhs as stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import lowering
from benchmarks.harness import figures, timing
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

NAMES = ("float32", "bare int8", "aqtlite")


class Case(NamedTuple):
    """One contraction."""

    name: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dims: Any


MK_KN = (((1,), (0,)), ((), ()))
MK_NK = (((1,), (1,)), ((), ()))
KM_KN = (((0,), (0,)), ((), ()))
KM_NK = (((0,), (1,)), ((), ()))

CASES = [
    Case("MK,KN  1024 x 1024 x 4096", (1024, 1024), (1024, 4096), MK_KN),
    Case("MK,NK  1024 x 1024 x 4096", (1024, 1024), (4096, 1024), MK_NK),
    Case("KM,KN  1024^3 (drhs, 2-D inputs)", (1024, 1024), (1024, 1024), KM_KN),
    Case("KM,NK  1024^3", (1024, 1024), (1024, 1024), KM_NK),
    Case(
        "BTK,BTN (drhs, 3-D inputs) 8 x 128",
        (8, 128, 1024),
        (8, 128, 1024),
        (((0, 1), (0, 1)), ((), ())),
    ),
    Case("1 row, weights KN  4096^2", (1, 4096), (4096, 4096), MK_KN),
    Case("1 row, weights NK  4096^2", (1, 4096), (4096, 4096), MK_NK),
    Case("2 rows, weights NK  4096^2", (2, 4096), (4096, 4096), MK_NK),
    Case("8 rows, weights NK  4096^2", (8, 4096), (4096, 4096), MK_NK),
    Case("64 rows, weights NK  4096^2", (64, 4096), (4096, 4096), MK_NK),
    Case("1 column  4096^2", (4096, 4096), (4096, 1), MK_KN),
    Case("K = 8  1024 x 8 x 1024", (1024, 8), (8, 1024), MK_KN),
    Case("odd sizes  1023 x 1021 x 1019", (1023, 1021), (1021, 1019), MK_KN),
    Case(
        "batched BKM,BKN  8 of 512^3",
        (8, 512, 512),
        (8, 512, 512),
        (((1,), (1,)), ((0,), (0,))),
    ),
    Case(
        "attention scores  bqhd,bkhd->bhqk",
        (4, 256, 8, 64),
        (4, 256, 8, 64),
        (((3,), (3,)), ((0, 2), (0, 2))),
    ),
    Case(
        "attention values  bhqk,bkhd->bhqd",
        (4, 8, 256, 256),
        (4, 256, 8, 64),
        (((3,), (1,)), ((0, 1), (0, 2))),
    ),
    Case(
        "their gradient  bhqk,bqhd->bhkd",
        (4, 8, 256, 256),
        (4, 256, 8, 64),
        (((2,), (1,)), ((0, 1), (0, 2))),
    ),
    Case(
        "decoding scores, one token  bqhd,bkhd->bhqk",
        (8, 1, 8, 64),
        (8, 256, 8, 64),
        (((3,), (3,)), ((0, 2), (0, 2))),
    ),
    Case(
        "decoding values, one head  bhk,bkhd->bhd",
        (8, 1, 1024),
        (8, 1024, 1, 64),
        (((2,), (1,)), ((0, 1), (0, 2))),
    ),
    Case(
        "mixing of experts  bsem,bse->bsm",
        (2, 128, 8, 256),
        (2, 128, 8),
        (((2,), (2,)), ((0, 1), (0, 1))),
    ),
    Case("K = 200,000 (past int32)  8 x K x 64", (8, 200_000), (200_000, 64), MK_KN),
]

QUICK_CASES = [case for case in CASES if case.name.startswith(("K = 8 ", "decoding"))]


def measure(case: Case, options: Options) -> tuple[dict[str, Any], bool]:
    """Seconds of each contestant; True if the integers agree."""
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.integers(-127, 128, shape, np.int8))
        for shape in (case.lhs, case.rhs)
    ]
    floats = [x.astype(jnp.float32) for x in operands]

    plain = jax.jit(lambda lhs, rhs: lax.dot_general(lhs, rhs, case.dims))
    bare = jax.jit(
        lambda lhs, rhs: lax.dot_general(
            lhs, rhs, case.dims, preferred_element_type=jnp.int32
        )
    )
    dot = lowering.Dot(case.dims, len(case.lhs), len(case.rhs))
    ours = jax.jit(
        lambda lhs, rhs: lowering.Integers()(
            dot, lowering.DotInput(lhs), lowering.DotInput(rhs)
        )
    )
    programs = (
        lambda: plain(*floats),
        lambda: bare(*operands),
        lambda: ours(*operands),
    )
    agree = np.asarray(bare(*operands), np.float64) == np.asarray(
        ours(*operands), np.float64
    )
    spreads = timing.alternate(
        dict(zip(NAMES, programs, strict=True)),
        repeats=options.repeats,
        seconds=options.seconds,
    )
    return spreads, bool(agree.all())


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """All cases, or `QUICK_CASES`."""
    measured = []
    for case in QUICK_CASES if options.quick else CASES:
        report(case.name)
        spreads, agree = measure(case, options)
        if not agree:
            raise ArithmeticError(f"contractions: the integers of {case.name} differ")
        what = {"contraction": case.name}
        measured += figures.compare("contractions", what, spreads)
    return measured

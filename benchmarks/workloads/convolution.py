"""Convolutions forward and forward + backward, against float32 and the peers.

    python -m benchmarks --only convolution

A 3 x 3 convolution and a depthwise one. aqtp quantizes convolutions only in the forward
pass and has no gradient for them; Qwix's gradient raises an error with groups.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import aqtlite
from benchmarks.harness import contestants, figures, phases, timing
from benchmarks.harness.contestants import (
    AQTLITE,
    AQTLITE_NEAREST,
    AQTP_NEAREST,
    FLOAT32,
    QWIX_NEAREST,
)
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.harness.peers import aqt_conv_general
from benchmarks.harness.peers import conv_general_qt as qwix_qt


class Case(NamedTuple):
    """One convolution, NHWC."""

    name: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int = 1


CASES = [
    Case("3 x 3, 16 x 32 x 32 x 64 to 128", (16, 32, 32, 64), (3, 3, 64, 128)),
    Case("depthwise 3 x 3, 16 x 32 x 32 x 64", (16, 32, 32, 64), (3, 3, 1, 64), 64),
]
QUICK_CASES = [
    Case("3 x 3, 2 x 8 x 8 x 4 to 8", (2, 8, 8, 4), (3, 3, 4, 8)),
    Case("depthwise 3 x 3, 2 x 8 x 8 x 4", (2, 8, 8, 4), (3, 3, 1, 4), 4),
]

Conv = Callable[..., jax.Array]


def _aqtlite(*, stochastic: bool) -> Conv:
    cfg = contestants.aqtlite_config(stochastic=stochastic)
    return aqtlite.make_conv_general_dilated(cfg)


def _qwix() -> Conv:
    cfg = qwix_qt.ConvGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )

    def conv(x: Any, kernel: Any, strides: Any, padding: Any, **kwargs: Any):
        return qwix_qt.conv_general_qt(x, kernel, cfg, strides, padding, **kwargs)

    return conv


def _aqtp() -> Conv:
    cfg = aqt_conv_general.conv_general_dilated_make(2, 8, 8)
    return aqt_conv_general.make_conv_general_dilated(cfg)


CONVOLUTIONS: dict[str, Callable[[], Conv]] = {
    FLOAT32: lambda: lax.conv_general_dilated,
    AQTP_NEAREST: _aqtp,
    QWIX_NEAREST: _qwix,
    AQTLITE: functools.partial(_aqtlite, stochastic=True),
    AQTLITE_NEAREST: functools.partial(_aqtlite, stochastic=False),
}


def has_gradient(name: str, case: Case) -> bool:
    """Returns True if a contestant can differentiate the convolution of a case."""
    return name != AQTP_NEAREST and (name != QWIX_NEAREST or case.groups == 1)


def forward(conv: Conv, case: Case) -> Conv:
    """The convolution of a case."""
    numbers = lax.conv_dimension_numbers(case.x, case.kernel, ("NHWC", "HWIO", "NHWC"))

    def apply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        out = conv(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=case.groups,
        )
        return jnp.asarray(out, jnp.float32)

    return apply


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """All cases, or `QUICK_CASES`."""
    key = jax.random.key(0)
    measured = []
    for case in QUICK_CASES if options.quick else CASES:
        operands = (
            jax.random.normal(key, case.x),
            jax.random.normal(key, case.kernel),
        )
        for phase in phases.PHASES:
            report(f"{case.name}, {phase}")
            forwards = {
                name: forward(make(), case)
                for name, make in CONVOLUTIONS.items()
                if phase == phases.FORWARD or has_gradient(name, case)
            }
            spreads = timing.alternate(
                phases.programs(forwards, operands, phase),
                repeats=options.repeats,
                seconds=options.seconds,
            )
            what = {"convolution": case.name, "phase": phase}
            measured += figures.compare("convolution", what, spreads)
    return measured

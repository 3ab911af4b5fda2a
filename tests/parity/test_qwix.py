"""Quantization error at or under the better of aqtp and Qwix, outputs and gradients.

8 bits, rounding to nearest, everything else at its default.
"""

import functools

import jax
import numpy as np
import pytest
from aqt.jax.v2 import config as aqtp_config
from qwix._src.core import dot_general_qt

import aqtlite
from tests.common import MATMUL, nearest, rms_error, value_and_gradients

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

LHS_SHAPE, RHS_SHAPE = (128, 256), (256, 64)


def qwix_dot_general(lhs, rhs, dims):
    cfg = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    return dot_general_qt.dot_general_qt(lhs, rhs, dims, cfg)


CONTESTANTS = {
    "float": jax.lax.dot_general,
    "aqtlite": aqtlite.make_dot_general(nearest()),
    "aqtp": aqtp_config.fully_quantized(use_stochastic_rounding=False),
    "qwix": qwix_dot_general,
}


@functools.cache
def programs():
    return {
        name: jax.jit(functools.partial(value_and_gradients, dot, dims=MATMUL))
        for name, dot in CONTESTANTS.items()
    }


SAMPLERS = {
    "gaussian": lambda rng, shape: rng.standard_normal(shape),
    "student_t3": lambda rng, shape: rng.standard_t(3, shape),
    "lognormal": lambda rng, shape: (
        rng.lognormal(size=shape) * rng.choice([-1.0, 1.0], shape)
    ),
}


@pytest.mark.parametrize("distribution", SAMPLERS)
def test_error(distribution):
    totals = {name: np.zeros(3) for name in CONTESTANTS if name != "float"}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        lhs, rhs, cotangent = (
            SAMPLERS[distribution](rng, shape).astype(np.float32)
            for shape in (LHS_SHAPE, RHS_SHAPE, (LHS_SHAPE[0], RHS_SHAPE[1]))
        )
        results = {
            name: program(lhs, rhs, cotangent=cotangent)
            for name, program in programs().items()
        }
        for name, total in totals.items():
            total += [
                rms_error(got, wanted)
                for got, wanted in zip(results[name], results["float"], strict=True)
            ]
    best = np.minimum(totals["aqtp"], totals["qwix"])
    # Qwix's int8 has -128 too, AQT's and ours has not: worth 0.04 to 0.16 % of error
    # on heavy tails, over 16 seeds. Equal integers with AQT rule that out for us.
    assert np.all(totals["aqtlite"] <= best * 1.002), totals
    assert np.all(totals["aqtlite"] > 0)

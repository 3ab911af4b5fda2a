"""Convolutions beside aqtp (forward) and Qwix (forward and gradients).

8 bits, rounding to nearest, a scale for each example and each output feature: the same
integers, so that results differ by the rounding of floats alone. Gradients quantize the
output gradient alike, too.
"""

import jax
import numpy as np
import pytest
from aqt.jax.v2 import aqt_conv_general
from jax import lax
from qwix._src.core import conv_general_qt

import aqtlite
from tests.common import nearest, normal, relative_error, rms_error
from tests.convolutions import CASES

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

QWIX = conv_general_qt.ConvGeneralQtConfig(
    lhs_qtype="int8",
    rhs_qtype="int8",
    dlhs_grad_qtype="int8",
    drhs_grad_qtype="int8",
)


def operands(case):
    numbers = lax.conv_dimension_numbers(case.lhs, case.rhs, ("NHWC", "HWIO", "NHWC"))
    geometry = *case[2:6], numbers, *case[6:]
    return normal(case.lhs), normal(case.rhs), geometry


@pytest.mark.parametrize("name", ["plain", "strides"])
def test_forward_is_that_of_aqtp(name):
    x, w, geometry = operands(CASES[name])
    theirs = aqt_conv_general.make_conv_general_dilated(
        aqt_conv_general.conv_general_dilated_make(2, 8, 8)
    )
    ours = aqtlite.make_conv_general_dilated(nearest())

    @jax.jit
    def both(x, w):
        return ours(x, w, *geometry), theirs(
            x,
            w,
            *geometry[:2],
            lhs_dilation=geometry[2],
            rhs_dilation=geometry[3],
            dimension_numbers=geometry[4],
        )

    got, wanted = both(x, w)
    # aqtp clips at 127.5 and scales so, which is 0.4 % off ours.
    assert rms_error(got, wanted) < 0.01
    exact = lax.conv_general_dilated(x, w, *geometry)
    assert rms_error(got, exact) <= 1.02 * rms_error(wanted, exact)


@pytest.mark.parametrize("name", ["plain", "dilations"])
def test_forward_and_gradients_are_those_of_qwix(name):
    x, w, geometry = operands(CASES[name])
    ours = aqtlite.make_conv_general_dilated(nearest())

    def theirs(x, w, *geometry):
        return conv_general_qt.conv_general_qt(x, w, QWIX, *geometry)

    def evaluate(conv, x, w):
        out, vjp = jax.vjp(lambda x, w: conv(x, w, *geometry), x, w)
        return out, *vjp(normal(out.shape, 2))

    @jax.jit
    def all_three(x, w):
        return tuple(
            evaluate(conv, x, w) for conv in (ours, theirs, lax.conv_general_dilated)
        )

    for got, wanted, exact in zip(*all_three(x, w), strict=True):
        assert relative_error(got, wanted) < 0.05
        assert rms_error(got, exact) <= 1.02 * rms_error(wanted, exact)
    np.testing.assert_allclose(*(one[0] for one in all_three(x, w)[:2]), rtol=1e-4)

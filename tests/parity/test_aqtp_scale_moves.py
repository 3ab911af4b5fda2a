"""Scales that move to the other operand are aqtp's `DequantMode.OTHER_INPUT`."""

import jax
import pytest
from aqt.jax.v2 import aqt_dot_general
from aqt.jax.v2 import config as aqtp_config

import aqtlite
from aqtlite import config
from tests.common import operands, relative_error, tensor

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_beside_a_float_operand(side):
    """aqtp multiplies the other operand after its quantization, which is to be none."""
    lhs, rhs, dims = operands("batch_and_two_contracting")
    bits = (8, None) if side == "lhs" else (None, 8)
    theirs = aqtp_config.config_v4(fwd_bits=None, dlhs_bits=None, drhs_bits=None)
    quantizer = theirs.fwd.dg_quantizer
    int8 = aqtp_config.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)
    setattr(quantizer, side, getattr(int8.fwd.dg_quantizer, side))
    one = getattr(theirs.fwd, side)
    one.dequant_mode = aqt_dot_general.DequantMode.OTHER_INPUT
    one.calibration_mode = aqt_dot_general.CalibrationMode.REMAINING_AXIS
    wanted = jax.jit(lambda lhs, rhs: theirs(lhs, rhs, dims))(lhs, rhs)

    tensors = [tensor(width) for width in bits]
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=tensors[0], rhs=tensors[1]))
    index = ("lhs", "rhs").index(side)
    kept = (*dims[0][index], *dims[1][index])
    pair = [lhs, rhs]
    remaining = [axis for axis in range(pair[index].ndim) if axis not in kept]
    pair[index] = aqtlite.quantize(pair[index], tensors[index], remaining)
    got = jax.jit(lambda *args: aqtlite.make_dot_general(cfg)(*args, dims))(*pair)
    assert relative_error(got, wanted) < 1e-5

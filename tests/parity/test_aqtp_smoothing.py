"""The scales of smoothing are those of aqtp's mid quantization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_dot_general
from aqt.jax.v2 import config as aqtp_config

import aqtlite
from aqtlite import config
from aqtlite.quantization.preparation import smoothing
from tests.common import MATMUL, normal, operands, rms_error, tensor

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def aqtp_config_with(alpha, bits=8):
    return aqtp_config.config_v4(
        fwd_bits=bits,
        dlhs_bits=None,
        drhs_bits=None,
        fwd_mid_alpha_both=alpha,
        dlhs_mid_alpha_both=aqtp_config.SKIP,
        drhs_mid_alpha_both=aqtp_config.SKIP,
    )


@pytest.mark.parametrize(
    ("case", "alpha"), [("odd_sizes", 0.25), ("batch_and_two_contracting", 0.5)]
)
def test_scales(case, alpha):
    lhs, rhs, dims = operands(case)
    quantizer = aqtp_config_with(alpha).fwd.dg_quantizer
    quantizer.skip_mid_scales = False
    quantizer.init_calibration()
    mode = aqt_dot_general.CalibrationMode.CONTRACTING_AXIS
    how = config.Smoothing(lhs_exponent=alpha, rhs_exponent=alpha, po2_scale=False)

    @jax.jit
    def both(lhs, rhs):
        (_, lhs_q), (_, rhs_q) = quantizer.calibrate(lhs, rhs, dims, mode, mode)
        found = smoothing.factors(how, lhs, rhs, dims)
        return (lhs_q.scale[1], rhs_q.scale[1]), (1 / found.lhs, 1 / found.rhs)

    for wanted, found in zip(*both(lhs, rhs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_example():
    """Binary operands that smoothing makes lossless (aqtp's own example)."""
    lhs = jnp.array([[1.0, 2.0, 4.0], [1.0, 4.0, 16.0]])
    rhs = jnp.array([[4.0, 2.0, 1.0], [16.0, 4.0, 1.0]])
    dims = (((1,), (1,)), ((0,), (0,)))
    one = tensor(1, grid={"preserve_max_val": True}, po2_scale=True)
    raw = config.DotGeneralRaw(lhs=one, rhs=one, smoothing=config.Smoothing())
    dot = aqtlite.make_dot_general(config.DotGeneral(fwd=raw))
    np.testing.assert_array_equal(dot(lhs, rhs, dims), [12.0, 48.0])


def test_aqtp_applies_the_scales_to_the_range_alone():
    """Its values are rounded as they were, on the smoothed range, and clipped."""
    x, w = normal((16, 64)).at[:, 3].multiply(50), normal((64, 8), 1)
    theirs = aqtp_config_with(0.5)
    how = config.Smoothing(po2_scale=False)
    cfg = config.update(config.qat(8), {"fwd.smoothing": how})
    ours = aqtlite.make_dot_general(cfg)

    outs = jax.jit(lambda x, w: ours(x, w, MATMUL))(x, w), theirs(x, w, MATMUL)
    first, second = (rms_error(out, x @ w) for out in outs)
    assert first < 0.01 < 0.3 < second

"""Calibrations give the scales of aqtp's."""

import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import calibration as aqtp
from aqt.jax.v2.numerics import int_numerics

import aqtlite
from aqtlite import calibration
from tests.common import normal, tensor

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def aqtp_scale(theirs, x, bits=8):
    grid = int_numerics.IntSymmetric(
        bits=bits,
        preserve_zero=True,
        preserve_max_val=False,
        clip=True,
        clip_gradient=False,
        round=True,
        noise_fn=None,
    )
    (scale,), _, _ = theirs.get_scale_and_bias_and_sparsity(x, (1,), grid)
    return np.asarray(scale)


def our_scale(ours, x, bits=8, **fields):
    return aqtlite.quantize(x, tensor(bits, calibration=ours, **fields), 1).scale


@pytest.mark.parametrize("po2", [False, True])
@pytest.mark.parametrize("bound", [1.0, 0.37, 12.5])
def test_constant(bound, po2):
    x = normal((4, 33))
    np.testing.assert_array_equal(
        our_scale(calibration.Constant(bound), x, po2_scale=po2),
        aqtp_scale(aqtp.ConstantCalibration(bound=bound, po2_scale=po2), x),
    )


@pytest.mark.parametrize("clipping_scale", [None, 0.9, 0.3])
def test_abs_max(clipping_scale):
    """One rounding apart: aqtp divides by the grid's bound."""
    x = normal((32, 33))
    np.testing.assert_allclose(
        our_scale(calibration.AbsMax(clipping_scale=clipping_scale), x),
        aqtp_scale(aqtp.AbsMaxCalibration(clipping_scale=clipping_scale), x),
        rtol=0 if clipping_scale is None else 2e-7,
    )


@pytest.mark.parametrize("clipping_scale", [1.0, 2.5])
@pytest.mark.parametrize("p", [1, 2, 3, 0.5, 2.4])
def test_abs_mean(p, clipping_scale):
    """aqtp sums float32 in some order."""
    x = normal((32, 333))
    x = jnp.where(jnp.abs(x) < 0.1, 0, x)
    np.testing.assert_allclose(
        our_scale(calibration.AbsMean(p=p, clipping_scale=clipping_scale), x),
        aqtp_scale(aqtp.AbsMeanCalibration(p=p, clipping_scale=clipping_scale), x),
        rtol=3e-6,
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_snr_search(bits):
    """The same fraction of the largest magnitude, but for near ties."""
    candidates = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98, 0.995, 1.0)
    x = normal((64, 128))
    ours = our_scale(calibration.SnrSearch(candidates), x, bits)
    theirs = aqtp_scale(
        aqtp.SnrBasedAutoCalibration(auto_clip_search_config=candidates), x, bits
    )
    assert np.isclose(ours, theirs, rtol=1e-6).mean() > 0.95
    assert len(np.unique(np.round(theirs / np.abs(x).max(1, keepdims=True), 6))) > 1

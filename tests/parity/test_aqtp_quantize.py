"""`aqtlite.quantize` gives the integers and scales of aqtp's quantizer, exactly."""

import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_quantizer, calibration, utils
from aqt.jax.v2.numerics import int_numerics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import aqtlite
from tests.common import normal, tensor

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def aqtp_quantize(x, bits, axes, preserve_max_val=False):
    quantizer = aqt_quantizer.quantizer_make(bits, preserve_max_val)
    quantized, _ = quantizer.quant(x, calibration_axes=axes)
    return quantized.qvalue, quantized.scale[0]


def assert_equals_aqtp(ours, unit, qvalue, scale):
    """aqtp keeps halves as floats, where we double them and halve the scale."""
    np.testing.assert_array_equal(
        np.asarray(ours.qvalue, np.float32) * unit, np.asarray(qvalue, np.float32)
    )
    np.testing.assert_array_equal(ours.scale, np.asarray(scale) * np.float32(unit))


@pytest.mark.parametrize("preserve_max_val", [False, True])
@pytest.mark.parametrize("bits", [8, 7, 4, 3, 2, 1])
def test_bits(bits, preserve_max_val):
    x = normal((64, 65))
    cfg = tensor(bits, grid={"preserve_max_val": preserve_max_val})
    assert_equals_aqtp(
        aqtlite.quantize(x, cfg, 1),
        cfg.numerics.unit,
        *aqtp_quantize(x, bits, (1,), preserve_max_val),
    )


@pytest.mark.parametrize("preserve_max_val", [False, True])
@pytest.mark.parametrize("preserve_zero", [False, True])
@pytest.mark.parametrize("bits", [8, 2])
def test_preserve_flags(bits, preserve_zero, preserve_max_val):
    x = normal((64, 65))
    grid = {"preserve_zero": preserve_zero, "preserve_max_val": preserve_max_val}
    theirs = int_numerics.IntSymmetric(
        bits=bits, clip=True, clip_gradient=False, round=True, noise_fn=None, **grid
    )
    quantizer = aqt_quantizer.Quantizer(
        numerics=theirs,
        calib_shared_axes=None,
        scale_stop_grad=True,
        calibration=calibration.AbsMaxCalibration,
        context=utils.Context(key=None, train_step=None),
    )
    quantizer.init_calibration()
    wanted, _ = quantizer.quant(x, calibration_axes=(1,))
    cfg = tensor(bits, grid=grid)
    assert cfg.numerics.bound == theirs.get_quant_bound()
    assert_equals_aqtp(
        aqtlite.quantize(x, cfg, 1), cfg.numerics.unit, wanted.qvalue, wanted.scale[0]
    )


@pytest.mark.parametrize("axes", [(), (0,), (2, 0), (0, 1, 2)])
def test_axes(axes):
    x = normal((5, 6, 7))
    assert_equals_aqtp(
        aqtlite.quantize(x, tensor(8), axes), 1, *aqtp_quantize(x, 8, axes)
    )


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_equal_aqtp_in_float32(dtype, bits):
    x = normal((64, 65), dtype=dtype)
    cfg = tensor(bits)
    ours = aqtlite.quantize(x, cfg, 1)
    assert ours.dtype == dtype and ours.scale.dtype == jnp.float32
    assert_equals_aqtp(
        ours, cfg.numerics.unit, *aqtp_quantize(x.astype(jnp.float32), bits, (1,))
    )


def test_every_float16_equals_aqtp_in_float32():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = values[np.isfinite(values)]
    x = jnp.asarray(finite.reshape(-1, 512)[np.argsort(finite[::512])])
    assert_equals_aqtp(
        aqtlite.quantize(x, tensor(8), 1), 1, *aqtp_quantize(x.astype("float32"), 8, 1)
    )


# Sizes are fixed, so that each program compiles once. aqtp has no rule for scales that
# are subnormal.
MAGNITUDES = st.floats(2.0**-100, 2.0**100, width=32)
FLOATS = st.one_of(st.just(0.0), MAGNITUDES, MAGNITUDES.map(lambda x: -x))


@settings(max_examples=60, deadline=None)
@given(
    x=hnp.arrays(np.float32, (3, 8), elements=FLOATS), bits=st.sampled_from([8, 4, 1])
)
def test_any_values(x, bits):
    cfg = tensor(bits)
    qvalue, scale = aqtp_quantize(x, bits, (1,))
    # An all-zero channel has scale 1 with us, and 1/bound with aqtp.
    has_values = np.any(x, axis=1, keepdims=True)
    scale = np.where(has_values, scale, 1)
    assert_equals_aqtp(aqtlite.quantize(x, cfg, 1), cfg.numerics.unit, qvalue, scale)

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aqtlite
from aqtlite.calibration import AbsMax, ceil_to_power_of_two, scale_from_bound
from tests.common import normal, tensor

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize("axes", [(), (1,), (2, 0), (0, 1, 2)])
def test_bound_is_the_largest_magnitude(axes):
    x = normal((3, 4, 5))
    bound = AbsMax().bound(x, axes)
    wanted = np.max(np.abs(np.asarray(x)), axis=axes, keepdims=True)
    assert bound.dtype == jnp.float32
    np.testing.assert_array_equal(bound, wanted)


def test_clipping_scale():
    x = jnp.array([[1.0, -4.0], [2.0, 0.5]])
    assert AbsMax(clipping_scale=0.5).bound(x, (1,)).tolist() == [[2.0], [1.0]]
    assert AbsMax(clipping_scale=2).bound(x, (0,)).tolist() == [[4.0, 8.0]]


def test_clipping_scale_clips_what_lies_beyond():
    x = jnp.array([1.0, -4.0, 0.5])
    cfg = tensor(8, calibration=AbsMax(clipping_scale=0.5))
    quantized = aqtlite.quantize(x, cfg, 0)
    assert quantized.qvalue.tolist() == [64, -127, 32]
    np.testing.assert_allclose(quantized.scale, [2 / 127.5], rtol=1e-6)


def test_empty_axis():
    assert AbsMax().bound(jnp.zeros((2, 0)), (1,)).tolist() == [[0.0], [0.0]]


def test_scale_is_one_where_there_is_nothing_to_map():
    bound = jnp.array([0.0, 1e-44, 2.0**-126, 127.0])
    scale = scale_from_bound(bound, 127.0)
    assert scale.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert scale_from_bound(jnp.float32(254.0), 127.0) == 2.0


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_ceil_to_power_of_two(value):
    power = float(ceil_to_power_of_two(jnp.float32(value)))
    mantissa, _ = np.frexp(power)
    assert mantissa == 0.5
    assert power / 2 < value <= power


def test_ceil_to_power_of_two_keeps_what_is_not_finite():
    got = ceil_to_power_of_two(jnp.array([jnp.inf, jnp.nan]))
    assert got[0] == jnp.inf and jnp.isnan(got[1])


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_po2_scale_is_the_next_power_of_two(bits):
    x = normal((64, 8)) * 2.0 ** normal((64, 1), 1)
    plain = np.asarray(aqtlite.quantize(x, tensor(bits), 1).scale)
    powers = np.asarray(aqtlite.quantize(x, tensor(bits, po2_scale=True), 1).scale)
    np.testing.assert_array_equal(np.frexp(powers)[0], 0.5)
    assert np.all((powers / 2 < plain) & (plain <= powers))


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (1e-46, ValueError),
        (1e-40, ValueError),
        (1e39, ValueError),
        (True, TypeError),
        ("1", TypeError),
    ],
)
def test_refuses(scale, error):
    with pytest.raises(error, match="clipping_scale must be"):
        AbsMax(clipping_scale=scale)


def test_equal_and_hashable():
    assert AbsMax(clipping_scale=1) == AbsMax(clipping_scale=1.0)
    assert hash(AbsMax(clipping_scale=1)) == hash(AbsMax(clipping_scale=1.0))
    assert AbsMax() != AbsMax(clipping_scale=1)

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import aqtlite
from aqtlite.calibration import MinMax
from tests.calibration import members
from tests.common import tensor

pytestmark = pytest.mark.code("quick")

AFFINE = members.TENSORS["min_max"]
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@settings(max_examples=50, deadline=None)
@given(x=hnp.arrays(np.float32, (3, 8), elements=FLOATS))
def test_range(x):
    high, low = MinMax().range(jnp.asarray(x), (1,), AFFINE.grid, ())
    np.testing.assert_array_equal(high, np.maximum(x.max(1, keepdims=True), 0))
    np.testing.assert_array_equal(low, np.minimum(x.min(1, keepdims=True), 0))
    assert high.dtype == low.dtype == jnp.float32


def test_empty_axis():
    high, low = MinMax().range(jnp.zeros((2, 0)), (1,), AFFINE.grid, ())
    assert high.tolist() == low.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("size", [8, 33, 128, 200, 513])
@pytest.mark.parametrize("offset", [-4.0, 0.0, 4.0])
def test_nan_is_found_on_whichever_side_the_rest_lies(size, offset):
    x = np.full((size, size), offset, np.float32)
    x[3, 7] = np.nan
    for axis in (0, 1):
        scale = np.asarray(aqtlite.quantize(x, AFFINE, axis).scale)
        assert np.flatnonzero(np.isnan(scale)) == [7 if axis == 0 else 3]


def test_one_sided_values_use_the_whole_grid():
    q = aqtlite.quantize(jnp.array([[0.0, 1.0, 2.0], [-2.0, -1.0, 0.0]]), AFFINE, 1)
    assert q.zero_point.tolist() == [[0], [255]]
    np.testing.assert_allclose(q.scale, 2 / 255, rtol=1e-6)
    assert q.qvalue[:, 0].tolist() == [0, 0] and q.qvalue[:, 2].tolist() == [255, 255]


def test_refuses_a_symmetric_grid():
    cfg = tensor(8, calibration=MinMax())
    with pytest.raises(ValueError, match="no zero point, but its calibration gives a"):
        aqtlite.quantize(jnp.ones(3), cfg, 0)

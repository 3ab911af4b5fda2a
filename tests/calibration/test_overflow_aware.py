import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from tests.common import normal, quick_jit

pytestmark = pytest.mark.code("quick")


def scales(x, dtype, how=None, **fields):
    how = how or calibration.OverflowAware()
    grid = numerics.Float.from_dtype(dtype)
    given = {"po2_scale": True, **fields}
    tensor = config.Tensor(numerics=grid, calibration=how, **given)
    return quick_jit(lambda x: aqtlite.quantize(x, tensor, 1).scale)(x)[:, 0]


@pytest.mark.parametrize(
    ("dtype", "largest", "excess"),
    [("float4_e2m1fn", 6, 7 / 6), ("float8_e4m3fn", 448, 31 / 30)],
)
@pytest.mark.parametrize("fields", [{}, {"po2_scale": False, "scale_dtype": "e8m0"}])
def test_the_smallest_power_that_clips_less_than_half_a_step(
    dtype, largest, excess, fields
):
    if "scale_dtype" in fields:
        fields = {**fields, "scale_dtype": "float8_e8m0fnu"}
    x = jnp.exp(20 * normal((512, 3)))
    found = np.asarray(scales(x, dtype, **fields), np.float64)
    bound = np.asarray(jnp.abs(x).max(1), np.float64)
    wanted = 2.0 ** np.ceil(np.log2(bound / (largest * excess * (1 - 2.0**-9))))
    np.testing.assert_array_equal(found, wanted)
    assert (bound > largest * found).any()
    assert (bound < largest * excess * found).all()


def test_around_the_threshold():
    """7 for E2M1, compared in bfloat16, in which 6.99 is 7."""
    x = jnp.array([[6.98], [6.99], [7.0], [13.97], [-6.98], [-7.0]])
    wanted = [1, 2, 2, 2, 1, 2]
    assert scales(x, "float4_e2m1fn").tolist() == wanted


def test_zeros_and_what_is_no_number():
    x = jnp.array([[0.0, 0], [jnp.nan, 1], [jnp.inf, 1], [3e38, 1], [1e-37, 0]])
    found = np.asarray(scales(x, "float4_e2m1fn"))
    assert np.isnan(found[1:3]).all()
    assert found[3] == 2.0**126
    assert (found[[0, 4]] > 0).all()


def test_of_another_calibration():
    x = normal((16, 32))
    how = calibration.OverflowAware(calibration.RMS(3))
    bound = np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), 1)) * 3
    found = np.asarray(scales(x, "float4_e2m1fn", how), np.float64)
    assert (bound < 7 * found).all()
    assert (bound > 3.4 * found).all()


def test_what_keeps_statistics_is_refused():
    with pytest.raises(ValueError, match="gathers statistics"):
        calibration.OverflowAware(calibration.MaxOverBatches())

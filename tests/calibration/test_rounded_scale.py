import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from tests.common import normal, quick_jit

pytestmark = pytest.mark.code("quick")


def scales(x, **fields):
    grid = numerics.Float.from_dtype("float4_e2m1fn")
    how = calibration.RoundedScale(**fields)
    tensor = config.Tensor(numerics=grid, calibration=how)
    return np.asarray(quick_jit(lambda x: aqtlite.quantize(x, tensor, 1).scale)(x))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_values_of_the_dtype(dtype):
    x = jnp.exp(2 * normal((512, 3)))
    bound = np.asarray(jnp.abs(x).max(1, keepdims=True))
    wanted = (bound / np.float32(6)).astype(getattr(ml_dtypes, dtype))
    np.testing.assert_array_equal(scales(x, dtype=dtype), wanted.astype(np.float32))


def test_the_smallest_and_the_largest():
    x = jnp.array([[1e-9], [1e9], [0.0], [jnp.nan], [jnp.inf]])
    small, large, zero, *others = scales(x)[:, 0]
    assert (small, large) == (2.0**-9, 448)
    assert zero > 0
    assert np.isnan(others).all()


def test_wrong_dtypes_are_refused():
    with pytest.raises(ValueError, match="no dtype of a Float grid"):
        calibration.RoundedScale(dtype="int8")
    with pytest.raises(TypeError, match=r"RoundedScale.dtype must be the name"):
        calibration.RoundedScale(dtype=jnp.float8_e4m3fn)

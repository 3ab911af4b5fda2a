"""Floats of up to four bits are served in four bits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, convert, widen_int4
from aqtlite.numerics import Float
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.codes import stored_bytes
from tests.common import normal

pytestmark = pytest.mark.code("quick")

GRIDS = [
    Float.from_dtype("float4_e2m1fn"),
    Float(exponent_bits=3, mantissa_bits=0),
    Float(exponent_bits=1, mantissa_bits=2),
    Float(exponent_bits=2, mantissa_bits=0),
    Float(exponent_bits=2, mantissa_bits=1, special_values="nan"),
    Float(exponent_bits=2, mantissa_bits=1, special_values="ieee"),
    Float(exponent_bits=2, mantissa_bits=1, special_values="fnuz"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_all_values_come_back(grid):
    magnitudes = np.float32(grid.magnitudes)
    stored = grid.round(jnp.concatenate([magnitudes, -magnitudes]), None)
    np.testing.assert_array_equal(
        jnp.abs(stored.astype(jnp.float32)), [*magnitudes, *magnitudes]
    )
    codes = jax.jit(stored_values.to_save, static_argnums=1)(stored, grid)
    assert codes.dtype == jnp.int4
    for given in (codes, widen_int4(codes), np.asarray(codes)):
        found = stored_values.on_grid(given, grid)
        assert found.dtype == stored.dtype
        # With the sign of zero.
        np.testing.assert_array_equal(
            np.asarray(found).view(np.uint8), np.asarray(stored).view(np.uint8)
        )


def test_codes_of_the_specification():
    grid = Float.from_dtype("float4_e2m1fn")
    values = jnp.asarray(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -6], jnp.float4_e2m1fn
    )
    stored = grid.round(values.astype(jnp.float32), None)
    np.testing.assert_array_equal(
        stored_values.to_save(stored, grid),
        jax.lax.bitcast_convert_type(values, jnp.int4),
    )


@pytest.mark.parametrize("preset", [config.mxfp4, config.nvfp4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_served_in_four_bits(preset, dtype):
    model = nn.Dense(
        32, use_bias=False, dtype=dtype, dot_general=AqtDotGeneral(preset())
    )
    x = normal((3, 64), 1, dtype)
    variables = model.init(jax.random.key(0), x)
    serving = convert(model, variables, x)
    (frozen,) = jax.tree.leaves(
        serving["aqt"], is_leaf=lambda x: isinstance(x, aqtlite.QTensor)
    )
    assert frozen.qvalue.dtype == jnp.int4
    assert stored_bytes(frozen.qvalue) == 32 * 64 // 2
    trained = jax.jit(model.apply)(variables, x)
    for given in (serving, widen_int4(serving)):
        np.testing.assert_array_equal(jax.jit(model.apply)(given, x), trained)

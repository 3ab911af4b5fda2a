"""Grids without a zero leave channels of zeros at zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral, convert
from tests.common import assert_same, mostly_slow, normal, quick_jit

ONE_BIT = numerics.IntSymmetric(bits=1)
GRIDS = {
    "1 bit": ONE_BIT,
    "1 bit, largest": numerics.IntSymmetric(bits=1, preserve_max_val=True),
    "4 bits": numerics.IntSymmetric(bits=4, preserve_zero=False),
    "8 bits": numerics.IntSymmetric(bits=8, preserve_zero=False),
}
FIELDS = {
    "plain": {},
    "power of two": {"po2_scale": True},
    "bfloat16": {"scale_dtype": jnp.bfloat16},
    "e8m0": {"scale_dtype": jnp.float8_e8m0fnu},
    "e4m3": {
        "scale_dtype": jnp.float8_e4m3fn,
        "scale_shared_axes": "per_tensor",
    },
    "blocks": {"blocks": config.Blocks(size=4)},
    "mean": {"calibration": calibration.AbsMean(clipping_scale=2)},
    "search": {"calibration": calibration.MseSearch((1.0, 0.8))},
    "percentile": {"calibration": calibration.Percentile(90)},
}
DIMS = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(
    "fields", mostly_slow(FIELDS, "plain", "blocks", "search", "e4m3")
)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_channel_of_zeros(grid, fields):
    tensor = config.Tensor(numerics=GRIDS[grid], **FIELDS[fields])
    x = normal((4, 8)).at[1].set(0).at[2].set(1e-38)
    q = aqtlite.quantize(x, tensor, 1)
    found = np.asarray(q.dequant())
    np.testing.assert_array_equal(found[1:3], 0)
    others = aqtlite.quantize(x[::3], tensor, 1)
    assert np.all(found[::3] != 0)
    if fields != "e4m3":  # Its scales are relative to the largest of the array.
        np.testing.assert_array_equal(found[::3], others.dequant())


@pytest.mark.parametrize("bits", [1, 4])
def test_contractions_and_gradients(bits):
    """As of the float contraction, wherever an operand is zero."""
    cfg = config.update(
        config.fully_quantized(fwd_bits=8),
        {
            "fwd.*.numerics": numerics.IntSymmetric(bits=bits, preserve_zero=False),
            "dlhs.lhs.numerics": numerics.IntSymmetric(bits=8),
            "drhs.lhs.numerics": numerics.IntSymmetric(bits=8),
        },
    )
    dot = aqtlite.make_dot_general(cfg)

    @jax.jit
    def both(x, w, g):
        out, vjp = jax.vjp(lambda x, w: dot(x, w, DIMS), x, w)
        return out, *vjp(g)

    x, w, g = normal((6, 8)), normal((8, 4), 1), normal((6, 4), 2)
    x, w, g = x.at[2].set(0), w.at[:, 1].set(0), g.at[:, 2].set(0)
    out, dx, dw = both(x, w, g)
    np.testing.assert_array_equal(out[2], 0)
    np.testing.assert_array_equal(out[:, 1], 0)
    np.testing.assert_array_equal(dw[:, 2], 0)
    # What takes a straight-through gradient, takes it at zero as well.
    assert np.all(np.asarray(dw)[:, 1] != 0) and np.all(np.asarray(dx)[2] != 0)
    assert all(np.isfinite(one).all() for one in (out, dx, dw))
    _, dx, dw = both(x, 0 * w, g)
    np.testing.assert_array_equal(dx, 0)
    assert np.isfinite(dw).all()


@pytest.mark.parametrize(
    "cfg", [config.weight_only(bits=1), config.fully_quantized(fwd_bits=1)]
)
def test_is_served(cfg):
    model = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    x = normal((3, 8)).at[0].set(0)
    variables = quick_jit(model.init)(jax.random.key(0), x)
    kernel = variables["params"]["kernel"].at[:, 1].set(0)
    variables = {"params": {**variables["params"], "kernel": kernel}}
    apply = jax.jit(model.apply)
    trained = apply(variables, x)
    assert_same(apply(convert(model, variables, x), x), trained)
    np.testing.assert_array_equal(trained[:, 1], 0)


def test_not_a_number_is_none_of_them():
    x = normal((4, 8)).at[1].set(0).at[2, 3].set(jnp.nan)
    found = aqtlite.quantize(x, config.Tensor(numerics=ONE_BIT), 1).dequant()
    assert np.isnan(found[2]).all() and not np.isnan(found[jnp.array([0, 1, 3])]).any()

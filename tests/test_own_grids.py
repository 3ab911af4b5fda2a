"""Grids of users' own whose stored values are no integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from tests.common import MATMUL, normal, tensor
from tests.extensions import e4m3, ternary

pytestmark = pytest.mark.code("quick")

X, W = normal((4, 64)), normal((64, 3), 1)
G = normal((4, 3), 2)


def forward(lhs=None, rhs=None):
    none = config.Tensor()
    raw = config.DotGeneralRaw(lhs=lhs or none, rhs=rhs or none)
    return aqtlite.make_dot_general(config.DotGeneral(fwd=raw))


@pytest.mark.parametrize("grid", [e4m3, ternary], ids=["float", "table"])
@pytest.mark.parametrize("other", [None, tensor(8)], ids=["float", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equals_the_dequantized_product(grid, other, dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    dot = forward(other, grid.TENSOR)

    @jax.jit
    def both(x, w):
        out = dot(x, w, MATMUL, preferred_element_type="float32")
        wide = x.astype(jnp.float32)
        if other is not None:
            wide = aqtlite.quantize(wide, other, 1).dequant()
        return out, wide, aqtlite.quantize(w.astype(jnp.float32), grid.TENSOR, 0)

    out, wide, w_q = both(x, w)
    # Products of float16 and bfloat16 are exact in float32, and summed there.
    np.testing.assert_allclose(out, wide @ w_q.dequant(), rtol=2e-5, atol=2e-5)


def test_half_operands_are_summed_in_float32():
    """In bfloat16, 4097 ones are 4096."""
    x, w = jnp.ones((1, 4097), jnp.bfloat16), jnp.ones((4097, 1), jnp.bfloat16)
    out = forward(e4m3.TENSOR, e4m3.TENSOR)(
        x, w, MATMUL, preferred_element_type="float32"
    )
    assert abs(float(out[0, 0]) - 4097) < 0.01


@pytest.mark.parametrize("grid", [e4m3, ternary], ids=["float", "table"])
@pytest.mark.parametrize("reuse", [True, False])
def test_gradients(grid, reuse):
    rhs = config.Tensor(use_fwd_quant=True) if reuse else grid.TENSOR
    backward = config.DotGeneralRaw(lhs=tensor(8), rhs=rhs)
    both = config.DotGeneralRaw(lhs=grid.TENSOR, rhs=grid.TENSOR)
    cfg = config.DotGeneral(fwd=both, dlhs=backward, drhs=backward)
    dot = aqtlite.make_dot_general(cfg)

    @jax.jit
    def gradients(x, w, g):
        return jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)[1](g)

    dlhs, drhs = gradients(X, W, G)
    if reuse:
        w_q = aqtlite.quantize(W, grid.TENSOR, 0).dequant()
        x_q = aqtlite.quantize(X, grid.TENSOR, 1).dequant()
        for got, wanted in ((dlhs, G @ w_q.T), (drhs, x_q.T @ G)):
            assert jnp.linalg.norm(got - wanted) < 0.02 * jnp.linalg.norm(wanted)
    else:
        assert jnp.isfinite(dlhs).all() and jnp.isfinite(drhs).all()

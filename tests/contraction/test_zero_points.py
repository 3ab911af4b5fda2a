"""Grids with a zero point, contracted as integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, numerics
from tests.common import MATMUL, normal, tensor
from tests.extensions.affine import TENSOR, AffineUint8

pytestmark = pytest.mark.code("quick")

X, W = jax.nn.relu(normal((6, 24))), normal((24, 10), 1) + 0.3
INT8 = tensor(8)


def integers(x, axis, how):
    """Stored values less their zero points, and the scale, as float64."""
    q = aqtlite.quantize(x, how, axis)
    zero_point = 0 if q.zero_point is None else np.asarray(q.zero_point, np.float64)
    return np.asarray(q.qvalue, np.float64) - zero_point, np.asarray(
        q.scale, np.float64
    )


@pytest.mark.code("users")
@pytest.mark.parametrize("lhs", [TENSOR, INT8], ids=["affine", "symmetric"])
@pytest.mark.parametrize("rhs", [TENSOR, INT8], ids=["affine", "symmetric"])
@pytest.mark.parametrize("fields", [{}, {"dg_in_dtype": "float32"}], ids=str)
def test_equals_the_product_of_the_integers(lhs, rhs, fields):
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs, **fields))
    out = aqtlite.make_dot_general(cfg)(X, W, MATMUL)
    (a, sa), (b, sb) = integers(X, 1, lhs), integers(W, 0, rhs)
    sums = (a @ b).astype(np.float32)
    np.testing.assert_array_equal(
        out, sums * sb.astype(np.float32) * sa.astype(np.float32)
    )


def test_sums_that_int32_does_not_hold():
    x, w = jnp.ones((1, 70_000)), jnp.ones((70_000, 1))
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=TENSOR, rhs=TENSOR))
    out = aqtlite.make_dot_general(cfg)(x, w, MATMUL)
    np.testing.assert_allclose(out, [[70_000.0]], rtol=1e-6)


def test_zero_is_exact():
    q = aqtlite.quantize(jnp.array([0.0, 0.31, 1.7]), TENSOR, 0)
    assert q.dequant()[0] == 0.0
    q = aqtlite.quantize(jnp.array([[2.0, 0.0, 3.1], [-2.0, 0.0, -9.0]]), TENSOR, 1)
    assert q.dequant()[:, 1].tolist() == [0.0, 0.0]
    assert q.zero_point.tolist() == [[0], [255]]


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_poisons_its_channel(value):
    q = aqtlite.quantize(jnp.array([[1.0, value], [1.0, 2.0]]), TENSOR, 1)
    assert jnp.isnan(q.dequant()[0]).all() and jnp.isfinite(q.dequant()[1]).all()


def test_zeros_and_one_element():
    assert (
        aqtlite.quantize(jnp.zeros((2, 3)), TENSOR, 1).dequant().tolist()
        == [[0.0] * 3] * 2
    )
    q = aqtlite.quantize(jnp.array([3.0]), TENSOR, 0)
    np.testing.assert_allclose(q.dequant(), [3.0], rtol=1e-6)


@pytest.mark.code("users")
@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_integers(reuse):
    g8 = tensor(8)
    backward = config.DotGeneralRaw(
        lhs=g8, rhs=config.Tensor(use_fwd_quant=True) if reuse else TENSOR
    )
    forward = config.DotGeneralRaw(lhs=TENSOR, rhs=TENSOR)
    cfg = config.DotGeneral(fwd=forward, dlhs=backward, drhs=backward)
    dot = aqtlite.make_dot_general(cfg)
    g = normal((6, 10), 2)
    _, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), X, W)
    for got, wanted in zip(vjp(g), (g @ W.T, X.T @ g), strict=True):
        error = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
        assert error < 0.03
    if reuse:
        b, sb = integers(W, 0, TENSOR)
        moved = np.asarray(g * sb.astype(np.float32))
        ga, gs = integers(jnp.asarray(moved), 1, g8)
        wanted = (ga @ b.T).astype(np.float32) * gs.astype(np.float32)
        np.testing.assert_array_equal(vjp(g)[0], wanted)


def test_weight_only():
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(rhs=TENSOR))
    out = aqtlite.make_dot_general(cfg)(X, W, MATMUL)
    wanted = X @ aqtlite.quantize(W, TENSOR, 0).dequant()
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def test_tiles():
    tiles = config.LocalAqt(contraction_axis_shard_count=2)
    raw = config.DotGeneralRaw(
        lhs=INT8, rhs=config.Tensor(use_fwd_quant=True), local_aqt=tiles
    )
    forward = config.DotGeneralRaw(lhs=TENSOR, rhs=TENSOR)
    dot = aqtlite.make_dot_general(config.DotGeneral(fwd=forward, dlhs=raw, drhs=raw))
    _, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), X, W)
    g = normal((6, 10), 2)
    for got, wanted in zip(vjp(g), (g @ W.T, X.T @ g), strict=True):
        assert jnp.linalg.norm(got - wanted) < 0.03 * jnp.linalg.norm(wanted)


def test_grid_and_calibration_have_to_fit():
    x = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="has a zero point, but its calibration"):
        aqtlite.quantize(x, config.Tensor(numerics=AffineUint8()), 0)
    int8 = numerics.IntSymmetric(bits=8)
    with pytest.raises(ValueError, match="has no zero point, but its calibration"):
        how = config.Tensor(numerics=int8, calibration=TENSOR.calibration)
        aqtlite.quantize(x, how, 0)

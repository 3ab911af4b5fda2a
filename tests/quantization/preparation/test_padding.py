"""Blocks that do not divide an axis, whose last one is padded with zeros."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, numerics, statistics
from aqtlite.config import Blocks, DotGeneral, DotGeneralRaw, Tensor
from tests.common import MATMUL, assert_same, normal, relative_error

INT8 = numerics.IntSymmetric(bits=8)
X, W, G = normal((5, 50)), normal((50, 7), 1), normal((5, 7), 2)


def int8(**blocks):
    return Tensor(numerics=INT8, blocks=Blocks(pad=True, **blocks))


FINE, SQUARE = int8(size=16), int8(size=16, remaining_size=4)
CFG = DotGeneral(
    fwd=DotGeneralRaw(lhs=FINE, rhs=SQUARE),
    dlhs=DotGeneralRaw(lhs=int8(size=4), rhs=FINE),
    drhs=DotGeneralRaw(lhs=FINE, rhs=int8(size=2)),
)


def value_and_gradients(dot):
    out, vjp = jax.vjp(dot, X, W)
    return out, *vjp(G)


@pytest.fixture(scope="module")
def results():
    """Output and gradients, and those of operands that are padded by hand."""
    dot_general = aqtlite.make_dot_general(CFG)

    def by_hand(x, w):
        x, w = jnp.pad(x, ((0, 0), (0, 14))), jnp.pad(w, ((0, 14), (0, 1)))
        return dot_general(x, w, MATMUL)[:, :7]

    def both():
        own = value_and_gradients(lambda x, w: dot_general(x, w, MATMUL))
        return own, value_and_gradients(by_hand)

    return jax.jit(both)()


def test_as_padded_by_hand(results):
    assert_same(*results)


def test_close_to_float(results):
    for got, wanted in zip(results[0], (X @ W, G @ W.T, X.T @ G), strict=True):
        assert relative_error(got, wanted) < 0.02


def test_weights_that_are_given(results):
    w = aqtlite.quantize(W, SQUARE, 0)
    assert w.shape == W.shape and w.scale.shape == (4, 2) and w.padding == (14, 1)
    dot_general = aqtlite.make_dot_general(CFG)
    out = jax.jit(lambda w: dot_general(X, w, MATMUL))(w)
    np.testing.assert_array_equal(out, results[0][0])


def test_a_shorter_block_has_the_scale_of_its_elements():
    q = aqtlite.quantize(X, FINE, 1)
    assert q.shape == q.dequant().shape == X.shape and q.size == X.size
    alone = aqtlite.quantize(X[:, 48:], Tensor(numerics=INT8), 1)
    np.testing.assert_array_equal(q.scale[:, 3:], alone.scale)
    np.testing.assert_array_equal(q.qvalue[:, 48:50], alone.qvalue)
    np.testing.assert_array_equal(q.qvalue[:, 50:], 0)
    assert "padding=(0, 14)" in repr(q)


def test_zero_points():
    tensor = Tensor(
        numerics=numerics.IntAffine(),
        calibration=calibration.MinMax(),
        blocks=Blocks(size=16, pad=True),
    )
    cfg = DotGeneral(fwd=DotGeneralRaw(lhs=tensor, rhs=FINE))
    out = jax.jit(aqtlite.make_dot_general(cfg), static_argnums=2)(X + 2, W, MATMUL)
    assert relative_error(out, (X + 2) @ W) < 0.02


def test_is_contracted_as_it_is():
    q = aqtlite.quantize(X, FINE, 1)
    for move in (lambda: q[0], lambda: q.T, lambda: q.reshape(250)):
        with pytest.raises(TypeError, match="blocks are padded by .0, 14."):
            move()


@pytest.mark.parametrize(
    ("lhs", "rhs", "message"),
    [
        (
            FINE,
            Tensor(numerics=INT8, blocks=Blocks(size=32, fit=True)),
            "blocks of 16 and 25, which pad",
        ),
        (
            Tensor(
                numerics=numerics.IntSymmetric(bits=2, preserve_zero=False),
                blocks=Blocks(size=16, pad=True),
            ),
            FINE,
            "fwd.lhs.numerics=.* has no zero to pad",
        ),
    ],
    ids=["the other side fits", "no zero"],
)
def test_refused(lhs, rhs, message):
    cfg = DotGeneral(fwd=DotGeneralRaw(lhs=lhs, rhs=rhs))
    with pytest.raises(ValueError, match=message):
        aqtlite.make_dot_general(cfg)(X, W, MATMUL)


def test_calibrations_that_count_zeros_are_refused():
    with pytest.raises(ValueError, match="zeros that pad a block would change its"):
        Tensor(
            numerics=INT8,
            calibration=calibration.RMS(3),
            blocks=Blocks(size=4, pad=True),
        )


PADDED = Tensor(numerics=INT8, blocks=Blocks(size=4, pad=True))


@pytest.mark.parametrize(
    "found", [calibration.Percentile(90), calibration.RMS(2), calibration.LSQ()]
)
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_zeros_that_pad_the_other_operand_count_as_well(side, found):
    axes = "per_tensor" if found.is_learned else None
    other = Tensor(numerics=INT8, calibration=found, calib_shared_axes=axes)
    operands = {"lhs": PADDED, "rhs": PADDED, side: other}
    cfg = DotGeneral(fwd=DotGeneralRaw(**operands))
    dot = aqtlite.make_dot_general(cfg)
    states = statistics.init_states(cfg, X, W, MATMUL)
    with pytest.raises(ValueError, match=f"fwd.{side}.calibration=.* to whole blocks"):
        dot(X, W, MATMUL, states=states)


@pytest.mark.parametrize(
    "found",
    [
        calibration.AbsMean(),
        calibration.MseSearch((1.0, 0.8)),
        calibration.Constant(2.0),
    ],
)
def test_zeros_that_pad_the_other_operand_change_no_range(found):
    lhs = Tensor(numerics=INT8, calibration=found)
    cfg = DotGeneral(fwd=DotGeneralRaw(lhs=lhs, rhs=PADDED))
    x = aqtlite.quantize(X, lhs, (1,)).dequant()
    w = aqtlite.quantize(W, PADDED, (0,)).dequant()
    out = aqtlite.make_dot_general(cfg)(X, W, MATMUL)
    np.testing.assert_allclose(out, x @ w, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "lhs",
    [
        Tensor(numerics=INT8, calibration=calibration.Constant(2.0)),
        dataclasses.replace(PADDED, calibration=calibration.Constant(2.0)),
    ],
)
def test_nan_at_the_end_of_a_padded_row(lhs, value):
    """Of ranges that do not see the array, the ends of rows are looked at."""
    dot = aqtlite.make_dot_general(DotGeneral(fwd=DotGeneralRaw(lhs=lhs, rhs=PADDED)))
    out = dot(X.at[1, -1].set(value), W, MATMUL)
    assert jnp.isnan(out).all(1).tolist() == [i == 1 for i in range(len(X))]

"""Scales that vary along contracting axes, moved to the other operand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, operations
from aqtlite.contraction import execution
from tests.common import MATMUL, assert_same, nearest, normal, relative_error, tensor

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
PV = "bhqk,bkhd->bqhd"
P = jax.nn.softmax(2 * normal((2, 3, 5, 8)))
V = normal((2, 8, 3, 4), 1) * jnp.exp(normal((2, 8, 3, 1), 2))
CACHE = aqtlite.quantize(V, tensor(8), 3)


def einsum(eqn, *args, cfg=INT8):
    return jax.jit(lambda *args: aqtlite.einsum(eqn, *args, cfg=cfg))(*args)


def scale_of_positions(scale):
    """Lays the scale of a cache out as the probabilities."""
    return jnp.einsum("bkhd->bhdk", scale)


@pytest.mark.code("users")
def test_the_integers_are_those_of_the_product():
    moved = P * scale_of_positions(CACHE.scale)
    p = aqtlite.quantize(moved, tensor(8), 3)
    sums = np.einsum(PV, np.int64(p.qvalue), np.int64(CACHE.qvalue))
    wanted = sums.astype(np.float32) * np.einsum("bhqk->bqhk", p.scale)
    np.testing.assert_array_equal(einsum(PV, P, CACHE), wanted)
    unit = aqtlite.quantize(V, tensor(8), 3).qvalue.astype(jnp.float32)
    error = relative_error(einsum(PV, P, CACHE), jnp.einsum(PV, moved, unit))
    assert 0 < error < 0.02
    assert_same(einsum("bkhd,bhqk->bqhd", CACHE, P), einsum(PV, P, CACHE))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_floats_it_is_what_the_dequantized_array_gives(dtype):
    got = einsum(PV, P.astype(dtype), CACHE.astype(dtype), cfg=config.weight_only())
    assert got.dtype == dtype
    wanted = jnp.einsum(PV, P.astype(dtype).astype("float32"), CACHE.dequant())
    assert relative_error(got, wanted) < {"float32": 1e-6, "bfloat16": 1e-2}[dtype]


def test_it_is_one_contraction_of_integers():
    operation = operations.DotGeneral((((3,), (1,)), ((0, 1), (0, 2))), 4, 4)
    how = execution.resolve(INT8, operation, P, CACHE, np.dtype("float32"))
    assert how.fwd.rhs.scale_moves and not how.fwd.lhs.scale_moves
    assert how.fwd.kind == "integers" and how.gradient("lhs").rhs.reuse == "stored"
    jaxpr = str(jax.make_jaxpr(lambda: aqtlite.einsum(PV, P, CACHE, cfg=INT8))())
    assert "scan" not in jaxpr and "while" not in jaxpr


AFFINE = config.Tensor(
    numerics=numerics.IntAffine(bits=8), calibration=calibration.MinMax()
)
E4M3 = config.Tensor(numerics=numerics.Float(exponent_bits=4, mantissa_bits=3))


@pytest.mark.parametrize(
    ("side", "own", "other"),
    [("lhs", AFFINE, AFFINE), ("rhs", AFFINE, tensor(8)), ("rhs", E4M3, E4M3)],
    ids=["affine lhs", "affine rhs", "fp8"],
)
def test_other_grids(side, own, other):
    """Zero points vary with the scales."""
    x, q = P[0, 0], aqtlite.quantize(V[0, :, 0] + 1, own, 1)
    if side == "rhs":
        operands, eqn, cfg = (x, q), "qk,kd->qd", {"lhs": other, "rhs": own}
    else:
        operands, eqn, cfg = (q, x), "kd,qk->qd", {"lhs": own, "rhs": other}
    raw = config.DotGeneralRaw(**cfg)
    got = einsum(eqn, *operands, cfg=config.DotGeneral(fwd=raw))
    moved = aqtlite.quantize(x * q.scale.T, other, 1)
    unit = q.dequant() / q.scale
    assert relative_error(got, moved.dequant() @ unit) < 1e-5


def test_scales_of_several_contracting_axes():
    x, w = normal((5, 3, 4)), normal((3, 4, 6), 1)
    each = tensor(8, calib_shared_axes=(2,))
    for q in (aqtlite.quantize(w, each, 2), aqtlite.quantize(w, each, 2)[:, :1]):
        got = einsum("nkl,klm->nm", x[:, :, : q.shape[1]], q, cfg=config.weight_only())
        wanted = jnp.einsum("nkl,klm->nm", x[:, :, : q.shape[1]], q.dequant())
        assert relative_error(got, wanted) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients(dtype):
    """Those of both operands, where the QTensor came of a contraction."""
    to_cache = config.update(INT8, {"out": tensor(8)})
    x, w = normal((2, 8, 6), 3, dtype), normal((6, 3, 4), 4, dtype)
    p = P.astype(dtype)

    def loss(p, w, cfg, to):
        v = aqtlite.einsum("bkc,chd->bkhd", x, w, cfg=to)
        return jnp.square(aqtlite.einsum(PV, p, v, cfg=cfg).astype("float32")).sum()

    def gradients(*cfgs):
        return jax.jit(jax.grad(lambda p, w: loss(p, w, *cfgs), argnums=(0, 1)))(p, w)

    for got, wanted in zip(
        gradients(INT8, to_cache), gradients(None, None), strict=True
    ):
        assert got.dtype == dtype
        assert relative_error(got, wanted) < 0.03


def test_a_scale_that_is_not_finite_poisons_its_products():
    q = aqtlite.quantize(V.at[1, 2, 0, 0].set(jnp.nan), tensor(8), 3)
    is_nan = np.isnan(einsum(PV, P, q))
    assert is_nan[1, :, 0].all() and is_nan.sum() == is_nan[1, :, 0].size


X, W = normal((4, 8)), normal((8, 3), 1)
ROWS = aqtlite.quantize(W, tensor(8), 1)


@pytest.mark.parametrize(
    ("lhs", "rhs", "match"),
    [
        (
            aqtlite.quantize(X, tensor(8), 0),
            ROWS,
            r"fwd\.lhs is a QTensor of shape \(4, 8\) .*is a QTensor as well, with a "
            r"scale of shape \(8, 1\)",
        ),
        (aqtlite.quantize(X, tensor(8), 1), ROWS, r"fwd\.rhs is a QTensor .* as well"),
        (
            X,
            aqtlite.quantize(W, tensor(8, blocks=config.Blocks(size=1)), 0),
            r"fwd\.rhs .*contracting axes \(0,\).* also varies along the axes \[1\]",
        ),
    ],
    ids=["both", "integers", "remaining"],
)
def test_is_refused_where_it_cannot_move(lhs, rhs, match):
    with pytest.raises(ValueError, match=match):
        aqtlite.make_dot_general(INT8)(lhs, rhs, MATMUL)


def test_is_refused_beside_statistics():
    cfg = config.update(INT8, {"fwd.lhs.calibration": calibration.MaxOverBatches()})
    with pytest.raises(ValueError, match="was found without the scale"):
        aqtlite.make_dot_general(cfg)(X, ROWS, MATMUL)


def test_blocks_of_one_element_where_it_cannot_move():
    """With a config of blocks, tiles are the way out."""
    blocks = tensor(8, blocks=config.Blocks(size=1))
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=tensor(8), rhs=blocks))
    q = aqtlite.quantize(W, blocks, 0)
    assert q.scale.shape == (8, 3)
    got = aqtlite.make_dot_general(cfg)(X, q, MATMUL)
    wanted = aqtlite.quantize(X, tensor(8), 1).dequant() @ q.dequant()
    assert relative_error(got, wanted) < 1e-5

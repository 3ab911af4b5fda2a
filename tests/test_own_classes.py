"""Grids and calibrations of users' own that break the contract of their base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from tests.common import MATMUL, normal, tensor
from tests.extensions import affine, ternary

pytestmark = pytest.mark.code("quick")

X, W = normal((4, 12)), normal((12, 3), 1)


def grid_with(**members):
    """An int8 grid, with other members."""

    def round_(self, scaled, noise):
        return jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8)

    defaults = {
        "bound": property(lambda self: 127.0),
        "storage_dtype": property(lambda self: np.dtype("int8")),
        "round": round_,
    }
    cls = type("Own", (numerics.Numerics,), {**defaults, **members})
    return dataclasses.dataclass(frozen=True)(cls)()


def value(x):
    return property(lambda self: x)


def run(grid, how=None):
    own = config.Tensor(numerics=grid, calibration=how or calibration.AbsMax())
    backward = config.DotGeneralRaw(
        lhs=tensor(8), rhs=config.Tensor(use_fwd_quant=True)
    )
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=own, rhs=own), dlhs=backward, drhs=backward
    )
    dot = aqtlite.make_dot_general(cfg)
    return jax.jit(jax.grad(lambda x: dot(x, W, MATMUL).sum()))(X)


def test_one_that_keeps_it():
    assert jnp.isfinite(run(grid_with())).all()


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"bound": value(-1.0)}, r"Own\.bound must be a positive, finite number"),
        ({"bound": value(0.0)}, r"Own\.bound must be a positive"),
        ({"bound": value(float("nan"))}, r"Own\.bound must be a positive"),
        ({"bound": value(300.0)}, r"Own\.bound=300\.0 is beyond the values of int8"),
        ({"arithmetic": value("ints")}, r"Own\.arithmetic must be 'integer', 'float'"),
        ({"arithmetic": value("float")}, r"is 'float', but Own\.storage_dtype is int8"),
        (
            {"storage_dtype": value(np.dtype("int32"))},
            r"storage of up to 16 bits, but Own\.storage_dtype is int32",
        ),
        (
            {
                "storage_dtype": value(np.dtype("float32")),
                "arithmetic": value("integer"),
            },
            r"Own\.storage_dtype is float32",
        ),
        ({"zero_point_range": value((0, 300))}, r"=\(0, 300\) is not a range of int8"),
    ],
)
def test_grids_that_a_config_refuses(members, match):
    with pytest.raises(ValueError, match=match):
        config.Tensor(numerics=grid_with(**members))


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"round": lambda self, s, n: s}, r"Own\.round must return int8, got float32"),
        ({"round": lambda self, s, n: None}, r"Own\.round must return int8, got NoneT"),
        (
            {"gradient_mask": lambda self, s: s},
            r"Own\.gradient_mask must return a bool array of shape \(4, 12\), got fl",
        ),
        (
            {"gradient_mask": lambda self, s: s[:, :1] > 0},
            r"Own\.gradient_mask must return a bool array of shape \(4, 12\)",
        ),
        (
            {"arithmetic": value("table"), "decode": lambda self, q: q},
            r"Own\.decode must return float32 of shape \(4, 12\), got int8",
        ),
    ],
)
def test_grids_that_return_something_else(members, match):
    with pytest.raises(TypeError, match=match):
        run(grid_with(**members))


def test_a_grid_that_rounds_to_another_shape():
    grid = grid_with(round=lambda self, s, n: s[:1].astype(jnp.int8))
    with pytest.raises(ValueError, match=r"Own\.round must return an array of shape"):
        run(grid)


def test_an_affine_grid_that_rounds_to_its_storage():
    class Own(affine.AffineUint8):
        def round(self, scaled, noise):
            return jnp.round(scaled).astype(jnp.uint8)

    how = config.Tensor(numerics=Own(), calibration=affine.OwnMinMax())
    with pytest.raises(TypeError, match=r"Own\.round must return int32, got uint8"):
        aqtlite.quantize(X, how, 1)


@pytest.mark.parametrize(
    ("bound", "error", "match"),
    [
        (lambda x: jnp.abs(x).max(1), ValueError, r"shape \(4, 1\), got \(4,\)"),
        (lambda x: jnp.abs(x).max(), ValueError, r"shape \(4, 1\), got \(\)"),
        (lambda x: jnp.abs(x).max()[None, None], ValueError, r"got \(1, 1\)"),
        (lambda x: 3.0, TypeError, r"must return float32, got float"),
        (lambda x: None, TypeError, r"must return float32, got NoneType"),
        (
            lambda x: jnp.abs(x).max(1, keepdims=True).astype(jnp.bfloat16),
            TypeError,
            r"must return float32, got bfloat16",
        ),
    ],
)
def test_calibrations_that_return_something_else(bound, error, match):
    cls = type(
        "Own", (calibration.Calibration,), {"bound": lambda self, x, axes: bound(x)}
    )
    how = dataclasses.dataclass(frozen=True)(cls)()
    with pytest.raises(error, match=rf"fwd\.lhs\.calibration: Own\.bound.*{match}"):
        run(numerics.IntSymmetric(bits=8), how)


def test_a_calibration_without_either_method():
    with pytest.raises(TypeError, match="has to override `bound` or `range`"):
        type("Own", (calibration.Calibration,), {})


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
@pytest.mark.parametrize("products", [12, 300, 5000])
def test_grids_of_16_bits(dtype, products):
    limits = np.iinfo(dtype)
    members = {
        "bound": value(float(limits.max)),
        "storage_dtype": value(np.dtype(dtype)),
    }
    if dtype == "uint16":
        members["zero_point_range"] = value((0, 65535))
        members["round"] = lambda self, s, n: jnp.round(s).astype(jnp.int32)
        how = affine.OwnMinMax()
    else:
        members["round"] = lambda self, s, n: jnp.clip(
            jnp.round(s), -32767, 32767
        ).astype(jnp.int16)
        how = calibration.AbsMax()
    own = config.Tensor(numerics=grid_with(**members), calibration=how)
    x, w = normal((4, products)), normal((products, 3), 1)
    pairs = (own, own), (own, tensor(8)), (tensor(8), own)

    @jax.jit
    def dequantized_and_contracted(x, w):
        def contracted(lhs, rhs):
            cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs))
            return aqtlite.make_dot_general(cfg)(x, w, MATMUL)

        wide = [aqtlite.quantize(a, own, i).dequant() for a, i in ((x, 1), (w, 0))]
        return wide, [contracted(*pair) for pair in pairs]

    (x, w), outs = dequantized_and_contracted(x, w)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for (lhs, rhs), out in zip(pairs, outs, strict=True):
        tolerance = 1e-5 if lhs is rhs else 0.03
        np.testing.assert_allclose(
            out, wanted, rtol=0, atol=tolerance * np.abs(wanted).max()
        )


def test_an_affine_range_that_overflows():
    x = jnp.array([[3e38, -3e38, 1.0]])
    q = aqtlite.quantize(x, affine.TENSOR, 1)
    assert jnp.isfinite(q.dequant()).all()


def test_qtensors_where_floats_are_wanted():
    q = aqtlite.quantize(W, tensor(8), 0)
    with pytest.raises(TypeError, match="rhs is a QTensor of .* is not quantized"):
        aqtlite.make_dot_general(None)(X, q, MATMUL)
    with pytest.raises(TypeError, match="x is a QTensor"):
        aqtlite.quantize(q, tensor(8), 0)


def test_qtensors_of_another_family():
    q = aqtlite.quantize(W, ternary.TENSOR, 0)
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=tensor(8), rhs=tensor(8)))
    with pytest.raises(
        TypeError, match=r"config's: Ternary\(.*\) against IntSymmetric"
    ):
        aqtlite.make_dot_general(cfg)(X, q, MATMUL)

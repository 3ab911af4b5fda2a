import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aqtlite
from aqtlite import config
from aqtlite.calibration import ConstantRange, MinMax
from aqtlite.numerics import IntAffine
from tests.common import MATMUL, normal, tensor
from tests.extensions import affine as affine_extension

X, W = jax.nn.relu(normal((6, 24))), normal((24, 10), 1) + 0.3
GRIDS = [
    IntAffine(bits=bits, signed=signed, narrow_range=narrow)
    for bits, signed, narrow in (
        (8, False, False),
        (8, True, False),
        (8, False, True),
        (5, True, True),
        (4, False, False),
        (3, True, False),
        (2, False, True),
    )
]
# Of each storage dtype.
each_dtype = pytest.mark.parametrize(
    "grid", [GRIDS[i] for i in (0, 1, 4, 5)], ids=lambda grid: repr(grid)[10:-1]
)
each = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: repr(grid)[10:-1])
quantize = jax.jit(aqtlite.quantize, static_argnums=(1, 2))


def affine(grid):
    return config.Tensor(numerics=grid, calibration=MinMax())


def steps(q):
    """Stored values less their zero points, as int64."""
    zero_point = np.asarray(q.zero_point, np.int64)
    return np.asarray(q.qvalue).astype(np.int64) - zero_point


@pytest.mark.parametrize(
    ("signed", "narrow", "ranges"),
    [
        (False, False, {8: (0, 255), 4: (0, 15), 2: (0, 3)}),
        (False, True, {8: (1, 255), 4: (1, 15), 2: (1, 3)}),
        (True, False, {8: (-128, 127), 4: (-8, 7), 2: (-2, 1)}),
        (True, True, {8: (-127, 127), 4: (-7, 7), 2: (-1, 1)}),
    ],
)
def test_ranges(signed, narrow, ranges):
    for bits, (smallest, largest) in ranges.items():
        grid = IntAffine(bits=bits, signed=signed, narrow_range=narrow)
        assert grid.zero_point_range == (smallest, largest)
        assert grid.bound == grid.largest_stored == largest - smallest
        assert jnp.iinfo(grid.storage_dtype).min <= smallest
        assert jnp.iinfo(grid.storage_dtype).max >= largest


@each
def test_follows_the_formula(grid):
    x = np.linspace(-0.7, 2.1, 1001, dtype=np.float32)
    q = aqtlite.quantize(jnp.asarray(x), affine(grid), 0)
    assert q.qvalue.dtype == grid.storage_dtype
    smallest, largest = grid.zero_point_range
    scale = (2.1 + 0.7) / (largest - smallest)
    np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
    zero_point = smallest - round(-0.7 / scale)
    assert q.zero_point.tolist() == [zero_point]
    real = x.astype(np.float64) / np.asarray(q.scale, np.float64)
    wanted = np.clip(np.rint(real) + zero_point, smallest, largest)
    tie = np.abs(np.abs(real - np.floor(real)) - 0.5) < 1e-4
    stored = np.asarray(q.qvalue).astype(np.int64)
    np.testing.assert_array_equal(stored[~tie], wanted[~tie])
    assert stored.min() == smallest and stored.max() == largest


@each_dtype
@settings(max_examples=15, deadline=None)
@given(values=st.lists(st.floats(-9, 9, width=32), min_size=12, max_size=12))
def test_is_monotonic_near_and_idempotent(grid, values):
    x = np.sort(np.array(values, np.float32))
    q = quantize(jnp.asarray(x), affine(grid), 0)
    out = np.asarray(q.dequant(), np.float64)
    assert (np.diff(out) >= 0).all()
    # Half a step, and as much again at the end that the zero point moves.
    assert (np.abs(out - x) <= float(q.scale[0]) * 1.001).all()
    rounded = grid.round(jnp.asarray(steps(q), jnp.float32), None)
    np.testing.assert_array_equal(rounded, steps(q))


def test_ties_go_to_even_and_far_values_are_clipped():
    got = IntAffine().round(jnp.array([0.5, 1.5, -2.5, 1e30, -jnp.inf]), None)
    assert got.tolist() == [0, 2, -2, 255, -255]


@each_dtype
@pytest.mark.parametrize(
    "other",
    [None, pytest.param(tensor(8), marks=pytest.mark.slow), tensor(1)],
    ids=["own", "8", "1"],
)
def test_contracts_like_integers(grid, other):
    lhs, rhs = affine(grid), other or affine(grid)
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs))
    out = jax.jit(aqtlite.make_dot_general(cfg), static_argnums=2)(X, W, MATMUL)
    a, b = quantize(X, lhs, 1), quantize(W, rhs, 0)
    right = steps(b) if other is None else np.asarray(b.qvalue).astype(np.int64)
    sums = (steps(a) @ right).astype(np.float32)
    np.testing.assert_array_equal(out, sums * np.asarray(b.scale) * np.asarray(a.scale))


def test_gradients_stop_where_values_are_clipped():
    grid = IntAffine(bits=4, clip_gradient=True)
    how = config.Tensor(numerics=grid, calibration=ConstantRange(min=-0.5, max=1))
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=how))
    dot = aqtlite.make_dot_general(cfg)
    # Steps of 0.1 from -0.5 on, and half a step that is rounded to the last one.
    x = jnp.array([[1.04, 1.06, 9.0, -0.54, -0.56, 0.0]])
    grad = jax.grad(lambda x: dot(x, jnp.ones((6, 1)), MATMUL).sum())(x)
    assert grad.tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0, 1.0]]
    assert how.grid.gradient_mask(x) is None


@dataclasses.dataclass(frozen=True)
class OwnMask(affine_extension.AffineUint8):
    """A grid that overrides the mask of grids without a zero point alone."""

    def gradient_mask(self, scaled):
        return scaled > 0


def test_an_own_grid_may_mask_without_the_zero_point():
    how = config.Tensor(numerics=OwnMask(), calibration=MinMax())
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=how))
    dot = aqtlite.make_dot_general(cfg)
    x = jnp.array([[1.0, -1.0, 0.5]])
    grad = jax.grad(lambda x: dot(x, jnp.ones((3, 1)), MATMUL).sum())(x)
    assert grad.tolist() == [[1.0, 0.0, 1.0]]


def test_stochastic_rounding_leaves_room_for_the_zero_point():
    """No element is clipped, wherever the zero point comes to lie."""
    grid = IntAffine(bits=3, stochastic_rounding=True)
    assert grid.calibrated_range == (1, 6) and grid.zero_point_range == (0, 7)
    for low in (-0.9, -0.55, -0.31, 0.0):
        x = jnp.array([low, 1.0])
        q = quantize(x, affine(grid), 0)
        position = np.asarray(x) / float(q.scale[0]) + int(q.zero_point[0])
        assert position.min() >= 0 and position.max() <= 7
        np.testing.assert_allclose(q.scale, (1 - low) / 5, rtol=1e-6)


@each_dtype
def test_gradients(grid):
    """The straight-through estimator: those of the dequantized operands."""
    forward = config.DotGeneralRaw(lhs=affine(grid), rhs=affine(grid))
    reused = config.DotGeneralRaw(rhs=config.Tensor(use_fwd_quant=True))
    cfg = config.DotGeneral(fwd=forward, dlhs=reused, drhs=reused)
    dot, g = aqtlite.make_dot_general(cfg), normal((6, 10), 2)

    @jax.jit
    def gradients(x, w, g):
        return jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)[1](g)

    x = quantize(X, affine(grid), 1).dequant()
    w = quantize(W, affine(grid), 0).dequant()
    for got, wanted in zip(gradients(X, W, g), (g @ w.T, x.T @ g), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [GRIDS[0], GRIDS[5]], ids=["uint8", "int3"])
def test_vmap(grid):
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=affine(grid), rhs=affine(grid))
    )
    dot = aqtlite.make_dot_general(cfg)
    x = np.stack([X, 3 * X + 1])

    def contract(x):
        return dot(x, W, MATMUL)

    mapped, each = jax.jit(lambda x: (jax.vmap(contract)(x), [*map(contract, x)]))(x)
    np.testing.assert_array_equal(mapped, np.stack(each))


@each
def test_zeros_and_one_element(grid):
    q = quantize(jnp.zeros((2, 3)), affine(grid), 1)
    assert q.dequant().tolist() == [[0.0] * 3] * 2
    for value in (3.0, -3.0):
        q = quantize(jnp.array([value]), affine(grid), 0)
        np.testing.assert_allclose(q.dequant(), [value], rtol=1e-6)


@each
def test_what_is_not_finite_poisons_its_channel(grid):
    x = np.array([[1, np.nan], [1, np.inf], [1, -np.inf], [1, 2]], np.float32)
    out = np.asarray(quantize(x, affine(grid), 1).dequant())
    assert np.isnan(out[:3]).all() and np.isfinite(out[3]).all()


def test_needs_a_range():
    with pytest.raises(ValueError, match="has a zero point, but its calibration"):
        aqtlite.quantize(jnp.ones(2), config.Tensor(numerics=IntAffine()), 0)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"bits": 1}, ValueError, "from 2 to 8, got 1; for one bit use IntSymmetric"),
        ({"bits": 9}, ValueError, "from 2 to 8, got 9$"),
        ({"bits": 8.0}, TypeError, "bits must be an int"),
        ({"bits": True}, TypeError, "bits must be an int"),
        ({"signed": 1}, TypeError, "signed must be a bool"),
        ({"narrow_range": None}, TypeError, "narrow_range must be a bool"),
        ({"clip_gradient": 1}, TypeError, "clip_gradient must be a bool"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding must be a bool"),
        (
            {"bits": 2, "narrow_range": True, "stochastic_rounding": True},
            ValueError,
            "three stored values, which leave none to map a range onto",
        ),
    ],
)
def test_refuses(kwargs, error, match):
    with pytest.raises(error, match=match):
        IntAffine(**kwargs)

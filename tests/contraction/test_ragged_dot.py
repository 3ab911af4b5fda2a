"""A quantized `lax.ragged_dot`: values, gradients, transformations, and bad input."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import aqtlite
from aqtlite import config
from tests.common import MATMUL, assert_same, nearest, normal, rms_error

M, K, N, G = 24, 16, 12, 4
X, W, COTANGENT = normal((M, K)), normal((G, K, N), 1), normal((M, N), 2)
SIZES = jnp.array([9, 0, 3, 7])

INT8 = aqtlite.make_ragged_dot(nearest())


def value_and_gradients(dot, x, w, sizes, g):
    out, vjp = jax.vjp(lambda x, w: dot(x, w, sizes), x, w)
    return out, *vjp(g)


@functools.cache
def program(dot):
    return jax.jit(functools.partial(value_and_gradients, dot))


@st.composite
def operands(draw):
    # Each shape is compiled once.
    m, k, n, g = draw(st.sampled_from([(24, 16, 12, 4), (5, 40, 3, 2)]))
    sizes = draw(st.lists(st.integers(0, 2 * m // g), min_size=g, max_size=g))
    x, w, cotangent = (
        normal(shape, draw(st.integers(0, 2**16)))
        for shape in ((m, k), (g, k, n), (m, n))
    )
    return x, w, jnp.array(sizes), cotangent


@pytest.mark.code("quick")
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(operands())
def test_near_float(args):
    """Empty groups and rows behind all groups have zeros, as in float."""
    for got, wanted in zip(
        program(INT8)(*args), program(lax.ragged_dot)(*args), strict=True
    ):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(got)[wanted == 0], 0)
        if np.any(wanted):
            assert rms_error(got, wanted) < 0.03


@pytest.mark.slow
def test_each_group_is_a_contraction_of_its_own():
    """Bit for bit; but the gradient of the output shares its scales in that of w."""
    out, dx, dw = program(INT8)(X, W, SIZES, COTANGENT)
    dot_general = aqtlite.make_dot_general(nearest())
    dims = (((1,), (0,)), ((), ()))

    @jax.jit
    def alone(x, w, g):
        out, vjp = jax.vjp(lambda x, w: dot_general(x, w, dims), x, w)
        return out, *vjp(g)

    start, size = 12, 7
    rows = slice(start, start + size)
    wanted = alone(X[rows], W[3], COTANGENT[rows])
    assert_same((out[rows], dx[rows]), wanted[:2])
    assert rms_error(dw[3], wanted[2]) < 0.02
    assert not out[start + size :].any() and not dx[start + size :].any()
    assert not dw[1].any()


@pytest.mark.parametrize(
    ("cfg", "is_shared"), [(config.nvfp4(), True), (config.mxfp4(), False)]
)
def test_experts_share_the_number_of_an_array(cfg, is_shared):
    dot = aqtlite.make_ragged_dot(cfg.for_serving())
    others = W.at[1:].mul(37.0)
    out, changed = dot(X, W, SIZES), dot(X, others, SIZES)
    first = SIZES[0]
    assert bool((out[:first] != changed[:first]).any()) == is_shared


def test_rows_behind_all_groups_may_hold_anything():
    behind = jnp.arange(M)[:, None] >= jnp.sum(SIZES)
    wanted = program(INT8)(X, W, SIZES, COTANGENT)
    x, g = (jnp.where(behind, fill, a) for fill, a in ((jnp.nan, X), (1e30, COTANGENT)))
    assert_same(program(INT8)(x, W, SIZES, g), wanted)


def test_no_experts():
    """All rows are behind all groups, as in `lax.ragged_dot`."""
    for got in program(INT8)(X, W[:0], SIZES[:0], COTANGENT):
        np.testing.assert_array_equal(got, jnp.zeros_like(got))
    assert INT8(X, W[:0], []).shape == (M, N)


def test_rows_are_not_padded_to_whole_blocks():
    blocks = config.Tensor(
        numerics=nearest().fwd.lhs.numerics, blocks=config.Blocks(size=7, pad=True)
    )
    changes = {"drhs.lhs": blocks, "drhs.rhs": blocks}
    dot = aqtlite.make_ragged_dot(config.update(nearest(), changes))
    with pytest.raises(
        ValueError, match="drhs.lhs.blocks.size=7 .* padded for dot_gen"
    ):
        jax.eval_shape(program(dot), X, W, SIZES, COTANGENT)


def test_a_nan_poisons_its_group_alone():
    out, dx, dw = program(INT8)(X.at[10, 2].set(jnp.nan), W, SIZES, COTANGENT)
    assert np.isnan(out[10]).all() and np.isfinite(np.delete(out, 10, 0)).all()
    assert np.isfinite(np.delete(dx, 10, 0)).all()
    assert np.isnan(dw).any()


@pytest.mark.code("quick")
@pytest.mark.parametrize(
    "cfg",
    [
        config.weight_only(),
        config.update(
            nearest(),
            {
                "fwd.*.blocks": config.Blocks(size=8),
                "drhs.*.blocks": config.Blocks(size=6),
                "*.rhs.use_fwd_quant": False,
            },
        ),
    ],
    ids=["weight_only", "blocks"],
)
def test_other_configs(cfg):
    dot = aqtlite.make_ragged_dot(cfg)
    args = X, W, SIZES, COTANGENT
    for got, wanted in zip(
        program(dot)(*args), program(lax.ragged_dot)(*args), strict=True
    ):
        assert rms_error(got, wanted) < 0.02


@pytest.mark.slow
def test_transformations():
    """vmap, scan and remat give what they give of each call by itself."""
    sizes = jnp.stack([SIZES, SIZES[::-1]])
    x = jnp.stack([X, -2 * X])

    def loss(x, w, sizes):
        return jnp.sum(INT8(x, w, sizes) * COTANGENT)

    gradient = jax.grad(loss, (0, 1))

    @jax.jit
    def all_of_them(x, w, sizes):
        mapped = jax.vmap(gradient, (0, None, 0))(x, w, sizes)
        _, scanned = lax.scan(
            lambda _, one: (None, gradient(one[0], w, one[1])), None, (x, sizes)
        )
        remat = jax.grad(jax.checkpoint(loss), (0, 1))(x[1], w, sizes[1])
        return mapped, scanned, remat

    each = [program(INT8)(x[i], W, sizes[i], COTANGENT)[1:] for i in range(2)]
    stacked = jax.tree.map(lambda *one: jnp.stack(one), *each)
    mapped, scanned, remat = all_of_them(x, W, sizes)
    assert_same(mapped, stacked)
    assert_same(scanned, stacked)
    assert_same(remat, each[1])


def test_frozen_weights_take_the_place_of_floats():
    cfg = config.update(nearest(), {})
    q = aqtlite.quantize(W, cfg.fwd.rhs, axes=1)
    stored = q.stored_in((0, 2, 1))
    wanted = program(INT8)(X, W, SIZES, COTANGENT)[0]
    for one in (q, stored):
        assert_same(jax.jit(INT8)(X, one, SIZES), wanted)


def test_functions_of_equal_configs_are_one():
    assert aqtlite.make_ragged_dot(nearest()) is INT8
    unquantized = aqtlite.make_ragged_dot(None)
    assert_same(unquantized(X, W, SIZES), lax.ragged_dot(X, W, SIZES))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"group_sizes": SIZES.astype(jnp.float32)}, TypeError, "must be integers"),
        (
            {"group_sizes": None},
            TypeError,
            r"must be integers, got NoneType; .*\(24, 16",
        ),
        ({"group_sizes": MATMUL}, TypeError, "dimension numbers .*as dot_general="),
        ({"group_sizes": SIZES[:3]}, ValueError, r"of shape \(4,\), got shape \(3,\)"),
        ({"group_sizes": jnp.array(3)}, ValueError, r"got shape \(\)"),
        ({"lhs": X[None]}, ValueError, r"lhs of shape \(1, 24, 16\)"),
        ({"rhs": W[0]}, ValueError, r"rhs of shape \(16, 12\)"),
        ({"lhs": X[:, 1:]}, ValueError, r"\(24, 15\) and rhs of shape \(4, 16, 12\)"),
        ({"lhs": X.astype(jnp.int32)}, TypeError, "fwd.lhs must be float32"),
        ({"group_offset": jnp.array([1])}, ValueError, "group_offset"),
        ({"precision": "highest"}, ValueError, "precision='highest'"),
        ({"preferred_element_type": jnp.int32}, TypeError, "ask for a float dtype"),
        ({"states": 3}, TypeError, "statistics.States"),
    ],
)
def test_bad_input(change, error, message):
    args = {"lhs": X, "rhs": W, "group_sizes": SIZES} | change
    with pytest.raises(error, match=message):
        INT8(**args)


def test_bad_configs():
    with pytest.raises(TypeError, match="make_ragged_dot takes a config.DotGeneral"):
        aqtlite.make_ragged_dot(8)
    smooth = config.update(nearest(), {"fwd.smoothing": config.Smoothing()})
    with pytest.raises(ValueError, match="fwd.smoothing was asked of a ragged_dot"):
        aqtlite.make_ragged_dot(smooth)(X, W, SIZES)
    with pytest.raises(TypeError, match="this contraction is not quantized"):
        q = aqtlite.quantize(W, nearest().fwd.rhs, axes=1)
        aqtlite.make_ragged_dot(None)(X, q, SIZES)

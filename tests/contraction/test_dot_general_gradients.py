"""Gradients of `make_dot_general`: what is reused, saved and clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config
from tests.common import (
    DIMENSION_NUMBERS,
    MATMUL,
    assert_same,
    nearest,
    normal,
    operands,
    quick_jit,
    relative_error,
    rms_error,
    tensor,
    value_and_gradients,
)

pytestmark = pytest.mark.code("quick")

X, W, G = normal((4, 8)), normal((8, 3), 1), normal((4, 3), 2)


def gradients(cfg, lhs=X, rhs=W, dims=MATMUL, cotangent=G, **kwargs):
    dot = aqtlite.make_dot_general(cfg)
    return value_and_gradients(dot, lhs, rhs, dims, cotangent, **kwargs)[1:]


def saved(cfg, lhs=X, rhs=W):
    """Dtypes and shapes of what the backward pass keeps."""
    dot = aqtlite.make_dot_general(cfg)
    _, vjp = jax.vjp(lambda lhs, rhs: dot(lhs, rhs, MATMUL), lhs, rhs)
    return sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(vjp))


@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_close_to_float(case):
    lhs, rhs, dims = operands(case)
    run = quick_jit(
        lambda lhs, rhs: [
            value_and_gradients(dot, lhs, rhs, dims)[1:]
            for dot in (aqtlite.make_dot_general(nearest()), jax.lax.dot_general)
        ]
    )
    for got, wanted in zip(*run(lhs, rhs), strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        assert relative_error(got, wanted) < 0.03


def test_reuses_the_forward_integers():
    """The gradient is quantized, with the scale of the integers moved onto it."""
    lhs, rhs = aqtlite.quantize(X, tensor(8), 1), aqtlite.quantize(W, tensor(8), 0)
    dlhs, drhs = gradients(nearest())
    moved = aqtlite.quantize(G * rhs.scale, tensor(8), 1).dequant()
    assert relative_error(dlhs, moved @ rhs.qvalue.astype("float32").T) < 2e-6
    moved = aqtlite.quantize(G * lhs.scale, tensor(8), 0).dequant()
    assert relative_error(drhs, lhs.qvalue.astype("float32").T @ moved) < 2e-6


def test_accumulator_of_reused_integers():
    """The sums are rounded to it before they are scaled; by default they are exact."""
    cfg = config.update(nearest(), {"drhs.dg_accumulator_dtype": "bfloat16"})
    (dlhs, drhs), (exact_dlhs, exact_drhs) = gradients(cfg), gradients(nearest())
    np.testing.assert_array_equal(dlhs, exact_dlhs)
    assert (drhs != exact_drhs).any()
    np.testing.assert_allclose(drhs, exact_drhs, rtol=2**-8)


@pytest.mark.parametrize("bwd_bits", [8, None])
def test_saves_integers_and_scales_alone(bwd_bits):
    cfg = config.fully_quantized(bwd_bits=bwd_bits)
    assert saved(cfg) == [
        ("float32", (1, 3)),
        ("float32", (4, 1)),
        ("int8", (4, 8)),
        ("int8", (8, 3)),
    ]


def test_saves_only_what_the_config_needs():
    assert saved(config.fully_quantized(fwd_bits=4))[2:] == [
        ("int4", (4, 8)),
        ("int4", (8, 3)),
    ]
    floats = [("float32", (4, 8)), ("float32", (8, 3))]
    assert saved(nearest(use_fwd_quant=False)) == floats
    assert saved(config.weight_only(8)) == [
        ("float32", (1, 3)),
        ("float32", (4, 8)),
        ("int8", (8, 3)),
    ]
    dot = aqtlite.make_dot_general(config.fully_quantized())
    _, vjp = jax.vjp(lambda x: dot(x, W, MATMUL), X)
    kept = sorted(leaf.dtype.name for leaf in jax.tree.leaves(vjp) if leaf.size)
    # W alone, and of X the scale, which goes into the seed of the noise.
    assert kept == ["float32", "float32", "int8"]


def test_float_backward_takes_dequantized_operands():
    dlhs, drhs = gradients(config.fully_quantized(bwd_bits=None))
    lhs, rhs = aqtlite.quantize(X, tensor(8), 1), aqtlite.quantize(W, tensor(8), 0)
    assert relative_error(dlhs, G @ rhs.dequant().T) < 2e-6
    assert relative_error(drhs, lhs.dequant().T @ G) < 2e-6


def test_float_backward_without_reuse_is_the_float_gradient():
    got = gradients(config.fully_quantized(bwd_bits=None, use_fwd_quant=False))
    for one, wanted in zip(got, (G @ W.T, X.T @ G), strict=True):
        assert relative_error(one, wanted) < 2e-6


def test_fake_quant():
    fake = tensor(8, use_fake_quant=True)
    reuse = config.DotGeneralRaw(rhs=config.Tensor(use_fwd_quant=True))
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=fake, rhs=fake), dlhs=reuse, drhs=reuse
    )
    wanted = gradients(config.fully_quantized(bwd_bits=None))
    for one, other in zip(gradients(cfg), wanted, strict=True):
        assert relative_error(one, other) < 2e-6


def test_each_gradient_has_its_own_config():
    cfg = config.update(
        config.unquantized(), {"drhs.lhs": tensor(2), "drhs.rhs": tensor(8)}
    )
    (dlhs, drhs), (exact_dlhs, exact_drhs) = gradients(cfg), gradients(None)
    assert relative_error(dlhs, exact_dlhs) < 2e-6
    wanted = (
        aqtlite.quantize(X, tensor(8), 0).dequant().T
        @ aqtlite.quantize(G, tensor(2), 0).dequant()
    )
    assert relative_error(drhs, wanted) < 2e-6
    assert relative_error(drhs, exact_drhs) > 0.05


@pytest.mark.code("users")
def test_clip_gradient():
    """No gradient to what a clipping calibration cut away; all of it otherwise."""
    clipping = calibration.AbsMax(clipping_scale=0.5)

    def dlhs(clip_gradient):
        lhs = tensor(8, grid={"clip_gradient": clip_gradient}, calibration=clipping)
        cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=tensor(8)))
        return np.asarray(gradients(cfg)[0])

    magnitude = np.abs(np.asarray(X))
    bound = 0.5 * magnitude.max(axis=1, keepdims=True) * (127 / 127.5)
    is_cut = magnitude > bound
    assert 0.1 < is_cut.mean() < 0.9
    np.testing.assert_array_equal(dlhs(True), np.where(is_cut, 0, dlhs(False)))
    assert np.all(dlhs(False) != 0)


@pytest.mark.code("users")
def test_gradient_of_zeros_and_empty_axes():
    dot = aqtlite.make_dot_general(nearest())
    grad = jax.grad(lambda *xs: dot(*xs, MATMUL).sum(), (0, 1))
    dlhs, drhs = grad(jnp.zeros((4, 8)), W)
    assert not np.any(drhs) and np.all(np.isfinite(dlhs))
    for lhs, rhs in (((0, 8), (8, 3)), ((4, 0), (0, 3)), ((4, 8), (8, 0))):
        got = grad(jnp.ones(lhs), jnp.ones(rhs))
        assert_same(got, (jnp.zeros(lhs), jnp.zeros(rhs)))


@pytest.mark.code("users")
@pytest.mark.parametrize("preferred", [None, "float32"])
@pytest.mark.parametrize(
    ("lhs", "rhs"), [("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_dtypes_of_gradients(lhs, rhs, preferred):
    """That of the operand, whatever the output's."""
    x, w = X.astype(lhs), W.astype(rhs)
    dlhs, drhs = gradients(
        nearest(), x, w, cotangent=None, preferred_element_type=preferred
    )
    assert (dlhs.dtype, drhs.dtype) == (lhs, rhs)
    out = jnp.promote_types(lhs, rhs) if preferred is None else preferred
    g = normal((4, 3), 3, out).astype("float32")
    exact = gradients(nearest(), x.astype("float32"), w.astype("float32"), cotangent=g)
    for got, wanted in zip((dlhs, drhs), exact, strict=True):
        assert_same(got, wanted.astype(got.dtype))


@pytest.mark.parametrize("bits", [8, 1])
def test_local_aqt_is_a_sum_over_tiles(bits):
    tiles = config.LocalAqt(contraction_axis_shard_count=2)
    cfg = config.DotGeneral(
        drhs=config.DotGeneralRaw(lhs=tensor(bits), rhs=tensor(bits), local_aqt=tiles)
    )
    got = gradients(cfg)[1]
    wanted = sum(
        aqtlite.quantize(X[rows], tensor(bits), 0).dequant().T
        @ aqtlite.quantize(G[rows], tensor(bits), 0).dequant()
        for rows in (slice(0, 2), slice(2, 4))
    )
    assert relative_error(got, wanted) < 2e-6


def test_local_aqt_reuses_integers():
    """Tiles of the forward's integers."""
    tiles = config.LocalAqt(contraction_axis_shard_count=2)
    got = gradients(config.update(nearest(), {"drhs.local_aqt": tiles}))[1]
    lhs = aqtlite.quantize(X, tensor(8), 1)
    wanted = sum(
        lhs.qvalue[rows].astype("float32").T
        @ aqtlite.quantize((G * lhs.scale)[rows], tensor(8), 0).dequant()
        for rows in (slice(0, 2), slice(2, 4))
    )
    assert relative_error(got, wanted) < 2e-6


def test_local_aqt_errors():
    def update(count):
        tiles = config.LocalAqt(contraction_axis_shard_count=count)
        return config.update(nearest(), {"drhs.local_aqt": tiles})

    with pytest.raises(ValueError, match="drhs.local_aqt.*=3 does not divide"):
        gradients(update(3))
    # Of one vector, the gradient of the weights sums nothing that could be split.
    dims = (((0,), (0,)), ((), ()))
    _, got = gradients(update(2), X[0], W, dims, G[0])
    wanted = gradients(nearest(), X[0], W, dims, G[0])[1]
    np.testing.assert_array_equal(got, wanted)


class TestSecondDerivatives:
    @staticmethod
    def penalty(dot, x, w):
        """The squared norm of a gradient: what a gradient penalty differentiates."""
        inner = jax.grad(lambda x: jnp.sum(jnp.tanh(dot(x, w, MATMUL))))
        return jnp.sum(inner(x) ** 2)

    def test_with_respect_to_one_operand(self):
        """The default preset, with stochastic rounding."""
        x, w = normal((32, 64)) / 8, normal((64, 32), 1)
        dot = aqtlite.make_dot_general(config.fully_quantized())
        got = jax.jit(jax.grad(lambda x: self.penalty(dot, x, w)))(x)
        wanted = jax.grad(lambda x: self.penalty(jax.lax.dot_general, x, w))(x)
        assert rms_error(got, wanted) < 0.1

    def test_mixed_needs_float_operands(self):
        x, w = normal((32, 64)) / 8, normal((64, 32), 1)
        dot = aqtlite.make_dot_general(config.fully_quantized())
        with pytest.raises(ValueError, match="dlhs.rhs.use_fwd_quant=True saves only"):
            jax.grad(lambda w: self.penalty(dot, x, w))(w)
        dot = aqtlite.make_dot_general(config.fully_quantized(use_fwd_quant=False))
        got = jax.jit(jax.grad(lambda w: self.penalty(dot, x, w)))(w)
        wanted = jax.grad(lambda w: self.penalty(jax.lax.dot_general, x, w))(w)
        assert rms_error(got, wanted) < 0.1


@pytest.mark.parametrize("preset", [nearest(), config.w4a8()])
def test_rows_of_zeros_leave_gradients(preset):
    """As of padding: a scale of 1 would dominate the gradient that it multiplies."""
    x = 0.01 * normal((16, 32)).at[8:].set(0)
    w = 0.01 * normal((32, 8), 1)
    g = normal((16, 8), 2)
    dot_general = aqtlite.make_dot_general(preset)
    _, vjp = jax.vjp(lambda x, w: dot_general(x, w, MATMUL), x, w)
    dx, dw = vjp(g)
    assert relative_error(dw, x.T @ g) < 0.02
    assert relative_error(dx, g @ w.T) < {8: 0.02, 4: 0.15}[preset.fwd.rhs.grid.bits]


def test_a_result_may_be_wider_where_users_forbid_promotion():
    dot_general = aqtlite.make_dot_general(config.weight_only(4))
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)

    def total(x, w):
        return dot_general(x, w, MATMUL, preferred_element_type=jnp.float32).sum()

    wanted = jax.grad(total, argnums=(0, 1))(x, w)
    with jax.numpy_dtype_promotion("strict"):
        assert_same(jax.grad(total, argnums=(0, 1))(x, w), wanted)


@pytest.mark.parametrize("preset", ["fully_quantized", "qat", "fp8", "w4a8"])
def test_a_second_derivative_names_the_change_of_the_config_that_gives_it(preset):
    cfg = getattr(config, preset)()

    def mixed(cfg):
        dot = aqtlite.make_dot_general(cfg)

        def loss(x, w):
            return (dot(x, w, MATMUL) ** 2).sum()

        return jax.grad(lambda x: (jax.grad(loss, 1)(x, W) ** 2).sum())(X)

    change = {"drhs.rhs.use_fwd_quant": False}
    with pytest.raises(
        ValueError, match="second derivative .*: config.update"
    ) as error:
        mixed(cfg)
    assert f"config.update(cfg, {change})".replace("'", '"') in str(error.value)
    assert mixed(config.update(cfg, change)).shape == X.shape

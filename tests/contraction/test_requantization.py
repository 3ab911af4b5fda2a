"""The quantized result of a contraction, and what takes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import QTensor, calibration, config, statistics
from tests.common import (
    MATMUL,
    assert_same,
    nearest,
    normal,
    relative_error,
    tensor,
)

pytestmark = pytest.mark.code("quick")


def with_out(cfg=None, **fields):
    """A config whose result has 8 bits."""
    out = tensor(8, **fields)
    return config.update(nearest() if cfg is None else cfg, {"out": out})


def fake_quant(x, out):
    """Rounds an array, with the straight-through gradient."""
    rounded = aqtlite.quantize(x, out, axes=-1).dequant()
    return x + jax.lax.stop_gradient(rounded - x)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    ("fields", "scale_shape"),
    [
        ({}, (4, 1)),
        pytest.param(
            {"calib_shared_axes": "per_tensor"}, (1, 1), marks=pytest.mark.slow
        ),
        pytest.param({"calib_shared_axes": (0,)}, (1, 6), marks=pytest.mark.slow),
        ({"blocks": config.Blocks(size=3)}, (4, 2)),
        ({"po2_scale": True, "calibration": calibration.Constant(2.0)}, (4, 1)),
    ],
)
def test_is_the_result_quantized(fields, scale_shape):
    cfg, x, w = with_out(**fields), normal((4, 5)), normal((5, 6))
    out = jax.jit(aqtlite.make_dot_general(cfg), static_argnums=2)(x, w, MATMUL)
    assert isinstance(out, QTensor)
    assert (out.shape, out.scale.shape, out.dtype) == ((4, 6), scale_shape, "float32")
    plain = aqtlite.make_dot_general(nearest())(x, w, MATMUL)
    wanted = aqtlite.quantize(plain, cfg.out, axes=-1)
    assert_same(out.stop_gradient(), wanted)
    fake = config.update(cfg, {"out.use_fake_quant": True})
    assert_same(aqtlite.make_dot_general(fake)(x, w, MATMUL), wanted.dequant())


def test_of_a_scalar_and_in_bfloat16():
    x = normal((5,), dtype=jnp.bfloat16)
    dot = aqtlite.make_dot_general(with_out())
    out = dot(x, x, (((0,), (0,)), ((), ())))
    assert (out.shape, out.scale.shape, out.dtype) == ((), (), jnp.bfloat16)
    assert abs(float(out.dequant()) / float(x @ x) - 1) < 0.02


@pytest.mark.code("users")
def test_of_float_operands():
    """Nothing but the result is quantized."""
    cfg = with_out(config.unquantized())
    x, w = normal((4, 5)), normal((5, 6))
    out = aqtlite.make_dot_general(cfg)(x, w, MATMUL)
    assert_same(out.stop_gradient(), aqtlite.quantize(x @ w, cfg.out, axes=1))


@pytest.mark.parametrize(
    "cfg",
    [nearest(), config.fully_quantized(fwd_bits=8, bwd_bits=None)],
    ids=["integers backward", "float backward"],
)
def test_gradients_are_those_of_fake_quantization(cfg):
    """Through a contraction of the integers, as if they had been rounded floats."""
    # On this grid, what was rounded is rounded to itself.
    cfg = config.update(cfg, {"fwd.lhs.numerics.preserve_max_val": True})
    out = cfg.fwd.lhs
    dot = aqtlite.make_dot_general(cfg)
    dot_to_integers = aqtlite.make_dot_general(config.update(cfg, {"out": out}))
    xs = normal((4, 5)), normal((5, 6), 1), normal((6, 3), 2)

    def contract(x, w, v):
        y = dot_to_integers(x, w, MATMUL)
        return jnp.sin(dot(y, v, MATMUL)).sum()

    def simulate(x, w, v):
        y = fake_quant(dot(x, w, MATMUL), out)
        return jnp.sin(dot(y, v, MATMUL)).sum()

    got = jax.jit(jax.value_and_grad(contract, (0, 1, 2)))(*xs)
    wanted = jax.jit(jax.value_and_grad(simulate, (0, 1, 2)))(*xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fake", [False, True])
def test_gradient_of_dequant_is_that_of_the_float_result(fake):
    """Except where the grid clips it."""
    clipped = with_out(
        config.unquantized(),
        grid={"clip_gradient": True},
        calibration=calibration.AbsMax(clipping_scale=0.5),
        use_fake_quant=fake,
    )
    x, w, g = normal((4, 5)), normal((5, 6)), normal((4, 6), 2)
    dot = aqtlite.make_dot_general(clipped)

    def loss(x):
        y = dot(x, w, MATMUL)
        return ((y if fake else y.transpose().dequant().T) * g).sum()

    is_inside = np.abs(x @ w) <= 0.5 * np.abs(x @ w).max(1, keepdims=True)
    assert 0 < is_inside.mean() < 1
    got = jax.grad(loss)(x)
    np.testing.assert_allclose(got, (g * is_inside) @ w.T, rtol=1e-5, atol=1e-5)


def test_a_constant_has_no_gradient():
    dot = aqtlite.make_dot_general(with_out())
    dot_of_constant = aqtlite.make_dot_general(nearest())
    x, w = normal((4, 5)), normal((5, 5))

    def loss(w):
        y = dot(x, w, MATMUL).stop_gradient()
        assert len(jax.tree.leaves(y)) == 2
        return dot_of_constant(y, w, MATMUL).sum() + y.dequant().sum()

    y = dot(x, w, MATMUL).stop_gradient()
    wanted = jax.grad(lambda w: dot_of_constant(y, w, MATMUL).sum())(w)
    assert_same(jax.grad(loss)(w), wanted)


@pytest.mark.code("users")
@pytest.mark.parametrize("fake", [False, True])
def test_einsum_names_the_axes_of_its_own_result(fake):
    """Attention: keys with a scale for each position and head go on as integers."""
    x, w, q = normal((2, 4, 6)), normal((6, 3, 5)), normal((2, 4, 3, 5))
    fields = {"calib_shared_axes": (2,), "use_fake_quant": fake}
    k = aqtlite.einsum("btd,dhk->bhkt", x, w, cfg=with_out(**fields))
    plain = aqtlite.einsum("btd,dhk->bhkt", x, w, cfg=nearest())
    wanted = aqtlite.quantize(plain, tensor(8), axes=2)
    cfg = config.update(nearest(), {"fwd.*.use_fake_quant": fake})
    if fake:
        assert_same(k, wanted.dequant())
    else:
        assert k.scale.shape == (2, 3, 1, 4)
        assert_same(k.stop_gradient(), wanted)
        assert_same(
            aqtlite.einsum("bqhk,bhkt->bhqt", q, k, cfg=cfg),
            aqtlite.einsum("bqhk,bhkt->bhqt", q, wanted, cfg=cfg),
        )
        with pytest.raises(TypeError, match=r"diagonals and sums .* \.dequant\(\)"):
            aqtlite.einsum("bqhk,bhkt->bhq", q, k, cfg=cfg)


def test_static_ranges():
    """Statistics of the result: the widest range of the batches."""
    gathered = calibration.MaxOverBatches()
    cfg = with_out(calibration=gathered, calib_shared_axes="per_tensor")
    dot = aqtlite.make_dot_general(cfg)
    x, w = normal((4, 5)), normal((5, 6))
    states = statistics.init_states(cfg, x, w, MATMUL)
    with pytest.raises(ValueError, match="^out.calibration has no statistics yet"):
        dot(x, w, MATMUL, states=states)
    with pytest.raises(ValueError, match="^out.calibration=.* was given no state"):
        dot(x, w, MATMUL)
    float_dot = aqtlite.make_dot_general(nearest())
    for batch in (x, 3 * x, x):
        y = float_dot(batch, w, MATMUL)
        out = statistics.update_output(cfg.out, states.out, y)
        states = states._replace(out=out)
    got = dot(x, w, MATMUL, states=states)
    wanted = aqtlite.quantize(3 * float_dot(x, w, MATMUL), tensor(8), (0, 1)).scale
    np.testing.assert_allclose(got.scale, wanted, rtol=1e-6)
    np.testing.assert_array_equal(got.unrounded, float_dot(x, w, MATMUL))
    # The float result that a QTensor holds is what counts, and not its integers.
    again = statistics.update_output(cfg.out, states.out, got)
    wanted = statistics.update_output(cfg.out, states.out, got.unrounded)
    jax.tree.map(np.testing.assert_array_equal, again, wanted)
    assert again.batches == states.out.batches + 1
    with pytest.raises(TypeError, match=r"QTensor of int8 .* without the float result"):
        statistics.update_output(cfg.out, states.out, got.stop_gradient())


def test_is_refused_where_it_cannot_be_taken():
    dot = aqtlite.make_dot_general(with_out(blocks=config.Blocks(count=5)))
    x, w = normal((4, 5)), normal((5, 5))
    out = dot(x, w, MATMUL)
    with pytest.raises(ValueError, match="varies along the contracting axes"):
        dot(out, w, MATMUL)
    with pytest.raises(TypeError, match=r"asks for a float operand.*\.dequant\(\)"):
        aqtlite.make_dot_general(config.weight_only())(out, w, MATMUL)
    with pytest.raises(TypeError, match=r"has no arithmetic.*\.dequant\(\)"):
        out + 1.0
    with pytest.raises(ValueError, match=r"out\.calib_shared_axes=\(2,\) names"):
        aqtlite.make_dot_general(with_out(calib_shared_axes=(2,)))(x, w, MATMUL)


def test_gradients_beside_statistics_of_the_result():
    cfg = with_out(
        config.qat(),
        calibration=calibration.MaxOverBatches(),
        calib_shared_axes="per_tensor",
    )
    x, w = normal((4, 8)), normal((8, 6), 1)
    states = statistics.init_states(cfg, x, w, MATMUL)
    after = statistics.update_output(cfg.out, states.out, x @ w)
    states = states._replace(out=after)
    dot = aqtlite.make_dot_general(cfg)
    got = jax.grad(lambda x: dot(x, w, MATMUL, states=states).dequant().sum())(x)
    wanted = jax.grad(lambda x: (x @ w).sum())(x)
    assert relative_error(got, wanted) < 0.02


@pytest.mark.parametrize("states", [5, statistics.States(lhs=jnp.ones(3))])
def test_states_of_another_kind(states):
    x, w = normal((4, 8)), normal((8, 6), 1)
    with pytest.raises(TypeError, match="states must be aqtlite.statistics.States"):
        aqtlite.make_dot_general(config.qat())(x, w, MATMUL, states=states)

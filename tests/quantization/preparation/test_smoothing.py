"""Scales on the contracting axes that move from one operand to the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from aqtlite.quantization.preparation import smoothing
from tests.common import (
    DIMENSION_NUMBERS,
    MATMUL,
    mostly_slow,
    nearest,
    normal,
    operands,
    rms_error,
    tensor,
    value_and_gradients,
)

pytestmark = pytest.mark.code("quick")

OUTLIERS = [3, 17, 40]
X = normal((16, 64)).at[:, OUTLIERS].multiply(50)
W = normal((64, 32), 1)
SMOOTH = config.Smoothing()
EXACT = config.Smoothing(po2_scale=False)
GATHERED = config.Smoothing(lhs_calibration=calibration.MaxOverBatches())
FWD = config.DotGeneralRaw(lhs=tensor(8), rhs=tensor(8))


def smoothed(cfg, how=SMOOTH):
    return config.update(cfg, {"fwd.smoothing": how})


def raw(how):
    return config.update(FWD, {"smoothing": how})


def states_of(cfg, *batches, w=W):
    states = statistics.init_states(cfg, X, w, MATMUL)
    for x in batches:
        states = statistics.update_states(cfg, states, x, w, MATMUL)
    return states


def errors_of(*cfgs):
    """Errors against the float product, all from one program."""

    @jax.jit
    def run(x, w):
        return [aqtlite.make_dot_general(cfg)(x, w, MATMUL) for cfg in cfgs]

    return [rms_error(out, X @ W) for out in run(X, W)]


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "case",
    mostly_slow(DIMENSION_NUMBERS, "one_row", "batch_in_the_middle", "scalar_output"),
)
def test_powers_of_two_cancel_bit_for_bit(case):
    lhs, rhs, dims = operands(case)
    lhs = lhs * jnp.exp(3 * normal(lhs.shape, 5))

    @jax.jit
    def both(lhs, rhs):
        moved = smoothing.smooth(raw(SMOOTH), lhs, rhs, dims)
        dot = [jax.lax.dot_general(*xs, dims) for xs in ((lhs, rhs), moved)]
        return *dot, smoothing.factors(EXACT, lhs, rhs, dims), moved[0] / lhs

    plain, cancelled, exact, po2 = both(lhs, rhs)
    np.testing.assert_array_equal(cancelled, plain)
    # The formula: the channels of both operands have the same magnitude.
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    kept = [axis for axis in range(lhs.ndim) if axis not in lhs_ca + lhs_ba]
    after = jnp.abs(lhs * exact.lhs).max(kept)
    kept = [axis for axis in range(rhs.ndim) if axis not in rhs_ca + rhs_ba]
    other = jnp.abs(rhs * exact.rhs).max(kept)
    names = "abcdefgh"
    lhs_names = [c for i, c in enumerate(names[: lhs.ndim]) if i in lhs_ca + lhs_ba]
    paired = dict(zip(rhs_ca + rhs_ba, lhs_ca + lhs_ba, strict=True))
    rhs_names = [names[paired[i]] for i in range(rhs.ndim) if i in paired]
    order = [rhs_names.index(name) for name in lhs_names]
    np.testing.assert_allclose(after, np.transpose(other, order), rtol=1e-5)
    assert np.all(np.log2(po2) % 1 == 0)
    assert np.abs(np.log2(po2 / np.asarray(exact.lhs))).max() <= 0.5001


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (config.Smoothing(lhs_exponent=1, rhs_exponent=0), lambda x, w: x),
        (config.Smoothing(lhs_exponent=0, rhs_exponent=1), lambda x, w: 1 / w),
        (config.Smoothing(lhs_exponent=0.75, rhs_exponent=0.25), None),
    ],
    ids=["all of lhs", "all of rhs", "some of both"],
)
def test_exponents(how, wanted):
    wanted = wanted or (lambda x, w: x**0.75 / w**0.25)
    how = config.update(how, {"po2_scale": False})
    found = smoothing.factors(how, X, W, MATMUL)
    scales = wanted(jnp.abs(X).max(0), jnp.abs(W).max(1))
    np.testing.assert_allclose(1 / found.lhs[0], scales, rtol=1e-5)
    np.testing.assert_allclose(found.rhs[:, 0], scales, rtol=1e-5)


def test_outliers_take_no_steps_from_other_channels():
    per_tensor = config.update(nearest(), {"fwd.lhs.calib_shared_axes": "per_tensor"})
    cfgs = [
        smoothed(cfg, how)
        for how in (None, SMOOTH, EXACT)
        for cfg in (nearest(), per_tensor)
    ]
    errors = np.reshape(errors_of(*cfgs), (3, 2))
    assert (errors[1:] < 0.6 * errors[0]).all()


def test_weights_alone():
    """The scaling of AWQ: the weights of large activations have finer steps."""
    cfg = config.weight_only(bits=4)
    how = config.Smoothing(rhs_exponent=0, lhs_calibration=calibration.AbsMean())
    plain, scaled = errors_of(cfg, smoothed(cfg, how))
    assert scaled < 0.9 * plain


def test_other_grids():
    fp8 = config.update(
        config.qat(8),
        {"fwd.*.numerics": numerics.Float(exponent_bits=4, mantissa_bits=3)},
    )
    affine = {
        "fwd.lhs.numerics": numerics.IntAffine(bits=8),
        "fwd.lhs.calibration": calibration.MinMax(),
    }
    affine = config.update(config.qat(8), affine)
    fp8_error, plain_error, error = errors_of(smoothed(fp8), affine, smoothed(affine))
    assert fp8_error < 0.05 and error < 0.6 * plain_error


@pytest.mark.parametrize(
    "cfg",
    [nearest(), nearest(use_fwd_quant=False), config.qat(8), config.weight_only(8)],
    ids=["reused", "anew", "float", "weight only"],
)
def test_gradients(cfg):
    """Those of the float contraction, within what int8 makes of it."""
    dot = aqtlite.make_dot_general(smoothed(cfg))
    found = jax.jit(lambda x, w: value_and_gradients(dot, x, w, MATMUL))(X, W)
    wanted = value_and_gradients(jax.lax.dot_general, X, W, MATMUL)
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == exact.dtype and rms_error(got, exact) < 0.02
    if not cfg.dlhs.lhs.is_quantized and not cfg.fwd.lhs.is_quantized:
        np.testing.assert_allclose(found[2], wanted[2], rtol=1e-4, atol=1e-3)


def test_a_float_backward_pass_is_exact():
    cfg = smoothed(config.qat(8))
    cfg = config.update(cfg, {"dlhs.rhs.use_fwd_quant": False})
    cfg = config.update(cfg, {"drhs.rhs.use_fwd_quant": False})
    dots = aqtlite.make_dot_general(cfg), jax.lax.dot_general

    @jax.jit
    def both(x, w):
        return [value_and_gradients(dot, x, w, MATMUL) for dot in dots]

    found, wanted = both(X, W)
    for got, exact in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(got, exact)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)]
)
def test_one_result_in_every_program(dtype):
    dot = aqtlite.make_dot_general(smoothed(nearest()))
    x, w = X.astype(dtype), W.astype(dtype)

    def run(x, w):
        return value_and_gradients(dot, x, w, MATMUL)

    @jax.jit
    def others(x, w):
        body = jax.checkpoint(lambda carry, _: (carry, run(x, w)))
        scanned = jax.lax.scan(body, 0, length=1)[1]
        mapped = jax.vmap(run)(jnp.stack([x, x + 1]), jnp.stack([w, w]))
        return [jax.tree.map(lambda one: one[0], out) for out in (scanned, mapped)]

    wanted = jax.jit(run)(x, w)
    for found in others(x, w):
        for got, one in zip(found, wanted, strict=True):
            assert got.dtype == one.dtype == dtype
            np.testing.assert_array_equal(got, one)


def test_float16_does_not_overflow():
    x, w = 3e4 * normal((4, 8)).clip(-1, 1), 1e-3 * normal((8, 3), 1)
    dot = aqtlite.make_dot_general(smoothed(nearest()))
    out = dot(x.astype(jnp.float16), w.astype(jnp.float16), MATMUL)
    assert rms_error(out, x @ w) < 0.02


def test_einsum():
    lhs, rhs = normal((2, 5, 3, 4)), normal((2, 3, 7, 4), 1)
    cfg = smoothed(nearest())

    @jax.jit
    def both(lhs, rhs):
        dims = (((3,), (3,)), ((0, 2), (0, 1)))
        return (
            aqtlite.einsum("btkd,bksd->btks", lhs, rhs, cfg=cfg),
            aqtlite.make_dot_general(cfg)(lhs, rhs, dims).transpose(0, 2, 1, 3),
        )

    found, wanted = both(lhs, rhs)
    np.testing.assert_array_equal(found, wanted)
    assert rms_error(found, np.einsum("btkd,bksd->btks", lhs, rhs)) < 0.02


def test_zeros_and_one_element():
    dot = jax.jit(
        lambda x, w: aqtlite.make_dot_general(smoothed(nearest()))(x, w, MATMUL)
    )
    x, w = X.at[:, 5].set(0).at[:, 6].set(1e-40), W.at[8].set(0)
    found = smoothing.factors(SMOOTH, x, w, MATMUL)
    assert (found.lhs[0, jnp.array([5, 6, 8])] == 1).all()
    assert rms_error(dot(x, w), x @ w) < 0.02
    assert (dot(0 * X, W) == 0).all()
    one = jnp.full((1, 1), 3.0)
    np.testing.assert_allclose(dot(one, one), [[9]], rtol=0.01)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_poisons_no_more_than_without(value):
    dots = [aqtlite.make_dot_general(cfg) for cfg in (nearest(), smoothed(nearest()))]
    x, w = X.at[2, 5].set(value), W.at[7, 3].set(value)
    plain, found = jax.jit(lambda x, w: [dot(x, w, MATMUL) for dot in dots])(x, w)
    wanted = jnp.isnan(plain)
    assert wanted.any() and not wanted.all()
    np.testing.assert_array_equal(jnp.isnan(found), wanted)


def test_statistics_fix_the_scales():
    cfg = smoothed(nearest(), GATHERED)
    state = states_of(cfg, X, 4 * X, X).smoothing
    assert state.batches == 3
    wanted = smoothing.factors(SMOOTH, 4 * X, W, MATMUL)
    np.testing.assert_array_equal(state.lhs_factor, wanted.lhs)
    # Another batch, and other weights, are contracted with the scales of the state.
    found = smoothing.factors(GATHERED, X / 8, 3 * W, MATMUL, state)
    for got, one in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, one)


@pytest.mark.code("users")
def test_a_frozen_operand_was_smoothed_before():
    cfg = smoothed(nearest(), GATHERED)
    dot, states = aqtlite.make_dot_general(cfg), states_of(cfg, X)
    _, w = smoothing.smooth(cfg.fwd, X, W, MATMUL, states.smoothing)
    q = aqtlite.quantize(w, cfg.fwd.rhs, 0)
    found = dot(X, q, MATMUL, states=states)
    np.testing.assert_array_equal(found, dot(X, W, MATMUL, states=states))
    after = statistics.update_states(cfg, states, 9 * X, q, MATMUL)
    assert after.smoothing is states.smoothing


def test_a_static_range_is_that_of_the_smoothed_operand():
    changes = {
        "fwd.lhs.calibration": calibration.MaxOverBatches(),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    cfg = config.update(smoothed(nearest(), GATHERED), changes)
    states = states_of(cfg, X)
    x, _ = smoothing.smooth(cfg.fwd, X, W, MATMUL, states.smoothing)
    (high,) = jax.tree.leaves(states.lhs.state["ends"])
    np.testing.assert_array_equal(high, [[jnp.abs(x).max()]])
    out = aqtlite.make_dot_general(cfg)(X, W, MATMUL, states=states)
    assert rms_error(out, X @ W) < 0.02


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_operands_that_are_not_finite_enter_no_statistics(value):
    cfg = smoothed(nearest(), GATHERED)
    bad, states = X.at[0, 0].set(value), states_of(cfg, X)
    jax.tree.map(np.testing.assert_array_equal, states_of(cfg, X, bad), states)
    of_weights = statistics.update_states(cfg, states, X, W.at[0, 0].set(value), MATMUL)
    jax.tree.map(np.testing.assert_array_equal, of_weights, states)
    out = aqtlite.make_dot_general(cfg)(bad, W, MATMUL, states=states)
    assert jnp.isnan(out[0]).all()


def test_before_the_first_batch():
    cfg = smoothed(nearest(), GATHERED)
    dot, states = aqtlite.make_dot_general(cfg), states_of(cfg)
    with pytest.raises(ValueError, match=r"fwd\.smoothing has no statistics yet"):
        dot(X, W, MATMUL, states=states)
    out = jax.jit(lambda states: dot(X, W, MATMUL, states=states))(states)
    assert jnp.isnan(out).all()


def test_statistics_of_another_calibration():
    first, second = (
        smoothed(
            config.fully_quantized(),
            config.Smoothing(
                lhs_calibration=calibration.PercentileOverBatches(mantissa_bits=bits)
            ),
        )
        for bits in (5, 3)
    )
    with pytest.raises(ValueError, match=r"fwd\.smoothing\.lhs_.* another calibration"):
        statistics.update_states(second, states_of(first, X), X, W, MATMUL)


def test_errors():
    frozen = aqtlite.quantize(W, tensor(8), 0)
    with pytest.raises(ValueError, match=r"fwd\.rhs is a QTensor .*fwd\.smoothing"):
        aqtlite.make_dot_general(smoothed(nearest()))(X, frozen, MATMUL)
    gathered = smoothed(nearest(), GATHERED)
    with pytest.raises(ValueError, match=r"fwd\.smoothing=.*was given none"):
        aqtlite.make_dot_general(gathered)(X, W, MATMUL)
    with pytest.raises(ValueError, match=r"fwd\.smoothing has one magnitude for each"):
        aqtlite.make_dot_general(gathered)(
            X[:, :8], W[:8], MATMUL, states=states_of(gathered, X)
        )
    ranges = config.Smoothing(lhs_calibration=calibration.MinMax())
    with pytest.raises(TypeError, match=r"fwd\.smoothing\.lhs_calibration=MinMax"):
        aqtlite.make_dot_general(smoothed(nearest(), ranges))(X, W, MATMUL)

"""NaN that a range known beforehand would hide."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from aqtlite.flax import AqtDotGeneral, calibrate, convert
from aqtlite.testing import assert_served_equals_trained
from tests.common import MATMUL, mostly_slow, normal, quick_jit
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((4, 16))
STATIC = config.static_int8()
AFFINE = config.update(
    STATIC,
    {
        "fwd.lhs.numerics": numerics.IntAffine(bits=8),
        "fwd.lhs.calibration": calibration.MovingAverage(of=calibration.MinMax()),
    },
)
CONSTANT = config.update(
    config.fully_quantized(), {"fwd.lhs.calibration": calibration.Constant(3.0)}
)
NEXT = {
    "static_int8": STATIC,
    "zero point": AFFINE,
    "delayed": config.fp8(delayed=True),
    "smoothquant": config.smoothquant(),
    "lsq": config.lsq(),
    "Constant": CONSTANT,
    "dynamic": config.fully_quantized(),
}


def dense(cfg, name=None):
    return nn.Dense(16, dot_general=AqtDotGeneral(cfg), name=name)


class Two(nn.Module):
    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        x = dense(STATIC, "first")(x)
        return dense(self.cfg, "second")(nn.relu(x))


class Branches(nn.Module):
    """The layer without statistics is in the middle of what the next one takes."""

    @nn.compact
    def __call__(self, x):
        parts = [dense(STATIC, name)(x) for name in ("left", "first", "right")]
        return dense(STATIC, "second")(jnp.concatenate(parts, -1))


def gathered(model):
    """Variables of no batch, and after one."""
    fresh = quick_jit(model.init)(jax.random.key(0), X)
    return fresh, calibrate(model, fresh, [X]) if "aqt_stats" in fresh else fresh


def without(variables, fresh):
    """Variables in which the first layer has no statistics."""
    found = {**variables["aqt_stats"], "first": fresh["aqt_stats"]["first"]}
    return {**variables, "aqt_stats": found}


@pytest.mark.parametrize(
    "following", mostly_slow(NEXT, "static_int8", "smoothquant", "dynamic")
)
def test_missing_statistics_poison_whatever_follows(following):
    """A layer that was added, or renamed, after the calibration."""
    model = Two(NEXT[following])
    fresh, done = gathered(model)
    partly = without(done, fresh)
    with pytest.raises(ValueError, match="has no statistics yet: gather some"):
        model.apply(partly, X)
    apply = jax.jit(model.apply)
    assert np.isfinite(apply(done, X)).all()
    assert np.isnan(apply(partly, X)).all()
    served = without(convert(model, done, X), fresh)
    assert np.isnan(apply(served, X)).all()


def test_missing_statistics_of_one_of_several_branches():
    model = Branches()
    fresh, done = gathered(model)
    assert np.isnan(jax.jit(model.apply)(without(done, fresh), X)).all()


@pytest.mark.parametrize("name", ["static_int8", "zero point", "delayed"])
def test_of_statistics_that_can_be_updated_any_element_counts(name):
    model = dense(NEXT[name])
    variables = gathered(model)[1]
    apply = jax.jit(model.apply)
    for bad in (np.nan, np.inf):
        assert np.isnan(apply(variables, X.at[1, 5].set(bad))).all()


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "cfg",
    [
        STATIC,
        AFFINE,
        pytest.param(CONSTANT, marks=pytest.mark.slow),
        pytest.param(config.lsq(), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("find_nan", [False, True])
def test_served_rows_are_poisoned_by_themselves(cfg, find_nan):
    cfg = config.update(cfg, {"fwd.lhs.find_nan": find_nan})
    model = dense(cfg)
    variables = gathered(model)[1]
    serving = convert(model, variables, X)
    assert_served_equals_trained(model, variables, X, serving=serving)
    apply = jax.jit(model.apply)
    wanted = apply(serving, X)
    # All of a row; an end of one; any element of one.
    x = X.at[0].set(np.nan).at[1, -1].set(-np.inf).at[2, 7].set(np.nan)
    out = apply(serving, x)
    assert np.isnan(out[:2]).all()
    assert np.isnan(out[2]).all() == find_nan
    np.testing.assert_array_equal(out[3], wanted[3])


@pytest.mark.code("users")
@pytest.mark.parametrize("shared", [None, "per_tensor"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_frozen_with_its_scale(shared, value):
    """Its integers alone would not tell."""
    cfg = config.update(config.lsq(), {"fwd.rhs.calib_shared_axes": shared})
    model = dense(cfg)
    variables = gathered(model)[1]
    kernel = variables["params"]["kernel"].at[0, 3].set(value)
    params = {**variables["params"], "kernel": kernel}
    variables = {**variables, "params": params}
    apply = jax.jit(model.apply)
    is_nan = np.isnan(apply(convert(model, variables, X), X))
    np.testing.assert_array_equal(is_nan, np.isnan(apply(variables, X)))
    assert is_nan[:, 3].all() and is_nan.all() == (shared == "per_tensor")


class SummedRows(nn.Module):
    """Float code behind a contraction, whose sums XLA orders by all that is fused."""

    @nn.compact
    def __call__(self, x):
        return dense(config.lsq())(x).sum(-1)


def test_a_weight_of_a_learned_range_leaves_no_trace_in_the_trained_program():
    model = SummedRows()
    x = normal((7, 16))
    variables = init(model, x)
    assert_served_equals_trained(model, variables, x)


def test_the_gradient_of_a_row_that_is_poisoned():
    dot = aqtlite.make_dot_general(CONSTANT)
    w = normal((16, 8), 1)
    x = X.at[1].set(jnp.nan)
    dx, dw = jax.grad(lambda x, w: (dot(x, w, MATMUL) ** 2).sum(), (0, 1))(x, w)
    assert np.isnan(dw).all() and np.isnan(dx[1]).all()


def test_a_gradient_of_a_diverged_step():
    """Its range is that of the steps before."""
    cfg = config.fp8(delayed=True)
    w, dot = normal((16, 8), 1), aqtlite.make_dot_general(config.fp8(delayed=True))
    states = statistics.init_states(cfg, X, w, MATMUL)
    states = statistics.update_states(cfg, states, X, w, MATMUL)

    @jax.jit
    def gradients(w, dlhs, drhs, g):
        def out(w, dlhs, drhs):
            given = states._replace(dlhs=dlhs, drhs=drhs)
            return dot(X, w, MATMUL, states=given)

        return jax.vjp(out, w, dlhs, drhs)[1](g)

    g = normal((4, 8), 2)
    _, *after = gradients(w, states.dlhs, states.drhs, g)
    assert np.isfinite(gradients(w, *after, g)[0]).all()
    assert np.isnan(gradients(w, *after, g.at[1, 2].set(jnp.nan))[0]).all()


@pytest.mark.parametrize("find_nan", [False, True])
def test_a_result_with_a_static_range(find_nan):
    out = config.Tensor(
        numerics=numerics.IntSymmetric(bits=8),
        calibration=calibration.MaxOverBatches(),
        calib_shared_axes="per_tensor",
        find_nan=find_nan,
    )
    cfg = config.update(config.fully_quantized(), {"out": out})
    dot, w = aqtlite.make_dot_general(cfg), normal((16, 8), 1)
    states = statistics.init_states(cfg, X, w, MATMUL)
    states = states._replace(out=statistics.update_output(cfg.out, states.out, X @ w))
    run = jax.jit(functools.partial(dot, dimension_numbers=MATMUL, states=states))
    assert np.isfinite(run(X, w).dequant()).all()
    assert np.isnan(run(X.at[2, 3].set(jnp.nan), w).dequant()).all()


def test_other_operations():
    """The rows of a convolution are its examples, those of experts theirs."""
    images, kernel = normal((3, 6, 6, 4)), normal((3, 3, 4, 8), 1)
    bad = images.at[1].set(jnp.nan)
    conv = aqtlite.make_conv_general_dilated(CONSTANT)
    out = conv(bad, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert np.isnan(out[1]).all() and np.isfinite(out[::2]).all()
    of_weights = config.update(
        config.weight_only(), {"fwd.rhs.calibration": calibration.Constant(3.0)}
    )
    w = normal((2, 16, 8)).at[1, :, 3].set(jnp.nan)
    out = aqtlite.make_ragged_dot(of_weights)(X, w, jnp.array([1, 3]))
    assert np.isfinite(out[0]).all() and np.isfinite(out[:, :3]).all()
    assert np.isnan(out[1:, 3]).all()


def test_find_nan_is_checked():
    with pytest.raises(TypeError, match="find_nan must be a bool"):
        config.update(STATIC, {"fwd.lhs.find_nan": 1})
    with pytest.raises(ValueError, match="find_nan=True would have no effect, because"):
        config.Tensor(find_nan=True)

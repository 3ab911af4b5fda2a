"""Deliberately broken programs, each of which is named (`aqtlite.diagnose`)."""

import re

import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from tests.common import MATMUL, nearest, normal

pytestmark = pytest.mark.code("quick")

X, W = normal((64, 64)), normal((64, 32), 1)


def contraction(cfg, name="layer", **kwargs):
    dot_general = aqtlite.make_dot_general(cfg)

    def contract(x, w):
        with jax.named_scope(name):
            return dot_general(x, w, MATMUL, **kwargs)

    return contract


CONTRACT = contraction(nearest())
NAMES = {
    "aqtlite": aqtlite,
    "calibration": calibration,
    "config": config,
    "cfg": nearest(),
}
TAPPED = aqtlite.tap(CONTRACT)


def found_in(*args):
    return aqtlite.diagnose(TAPPED(*args)[1])


def remedied(finding):
    """The first remedy of a finding, evaluated."""
    return eval(finding.remedy.partition(", or")[0], NAMES)


def test_nothing_stands_out_of_a_sound_program():
    assert found_in(X, W) == ()


def test_a_nan_channel_is_named_by_index():
    (one,) = found_in(X.at[:, 5].set(jnp.nan), W)
    assert (one.path, one.operand, one.severity) == ("layer", "fwd.lhs", "error")
    assert (
        "64 of 4096 elements are NaN" in one.what and "channel 5 of axis 1" in one.what
    )
    (one,) = found_in(X, W.at[3, 9].set(jnp.inf))
    assert one.operand == "fwd.rhs" and "1 of 2048" in one.what


def test_an_outlier_channel_is_named_by_operand_and_index():
    (one,) = found_in(X.at[:, 37].mul(300), W)
    assert (one.operand, one.severity) == ("fwd.lhs", "warning")
    ratio = int(one.what.partition(" is ")[2].split()[0])
    assert "channel 37 of axis 1" in one.what and 200 < ratio < 450
    smoothing = {"fwd.smoothing": config.smoothquant().fwd.smoothing}
    assert remedied(one) == config.update(NAMES["cfg"], smoothing)
    (one,) = found_in(X, W.at[11].mul(1000))
    assert one.operand == "fwd.rhs" and "channel 11 of axis 0" in one.what


@pytest.mark.parametrize("w", [W, {"up": W}, {"layer": {"kernel": W}}])
def test_a_contraction_without_a_name_scope_is_named_as_rules_match_it(w):
    def function(w, x):
        return jnp.einsum("bk,kn->bn", x, *jax.tree.leaves(w)) + (2 * x) @ (
            jax.tree.leaves(w)[0] + 1
        )

    quantized = aqtlite.quantize_function(function, nearest(), params=0)
    x = X.at[:, 37].mul(300)
    found = aqtlite.diagnose(quantized, w, x)
    paths = [one.path for one in quantized.plan(w, x).quantized()]
    assert [one.path for one in found] == paths and len(set(paths)) == 2
    rules = [aqtlite.Rule(path=re.escape(one.path), cfg=remedied(one)) for one in found]
    quantized = aqtlite.quantize_function(function, rules, params=0)
    assert len(quantized.plan(w, x).quantized()) == 2


def test_a_label_stands_for_an_empty_path():
    (one,) = aqtlite.diagnose(
        lambda x, w: aqtlite.einsum("bk,kn->bn", x, w, cfg=nearest()),
        X.at[:, 37].mul(300),
        W,
    )
    assert one.path == "" and "(no name scope) fwd.lhs: channel" in str(one)
    assert isinstance(remedied(one), config.DotGeneral)


def test_an_operand_of_few_decibels():
    coarse = {
        "fwd.rhs.numerics": numerics.IntSymmetric(bits=2),
        "fwd.rhs.calib_shared_axes": "per_tensor",
    }
    cfg = config.update(nearest(), coarse)
    (noisy,) = aqtlite.diagnose(contraction(cfg), X, W)
    assert (noisy.operand, noisy.severity) == ("fwd.rhs", "warning")
    assert "signal-to-noise" in noisy.what
    names = {**NAMES, "numerics": numerics, "cfg": cfg}
    more, own = (eval(text, names) for text in noisy.remedy.split(", or "))
    assert more.fwd.rhs.grid.bits == 8 and own.fwd.rhs.calib_shared_axes is None


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_grids_of_few_bits_are_no_findings_by_themselves(bits):
    assert aqtlite.diagnose(contraction(config.qat(bits)), X, W) == ()


@pytest.mark.parametrize("cfg", [config.lsq(2), config.lsq_weight_only(2)])
def test_learned_scales_clip_by_design(cfg):
    assert of_learned(cfg, X) == ()


def test_a_learned_scale_is_not_of_batches():
    (one,) = of_learned(config.lsq(8, bwd_bits=None), X.at[:, 37].mul(300))
    assert (one.operand, one.severity) == ("fwd.lhs", "error")
    assert "what the learned scale reaches" in one.what
    assert "batches" not in one.what and "statistics" not in one.remedy


def test_a_learned_range_may_drift():
    quantized = aqtlite.quantize_function(jnp.matmul, config.lsq(8), params=1)
    state = quantized.init_state(X, W)
    tapped = aqtlite.tap(lambda x, w: quantized.evaluate(state, (x, w), {}))
    found = aqtlite.diagnose({0: tapped(X / 16, W)[1], 9: tapped(X, W)[1]})
    (one,) = (x for x in found if "drifts" in x.what)
    assert one.severity == "note" and "is learned" in one.remedy


def of_learned(cfg, x):
    """Findings about freshly initialized scales."""
    quantized = aqtlite.quantize_function(jnp.matmul, cfg, params=1)
    state = quantized.init_state(x, W)
    return aqtlite.diagnose(lambda x, w: quantized.evaluate(state, (x, w), {}), x, W)


def test_outliers_do_no_harm_on_grids_of_floats():
    def function(x, w):
        loud = contraction(config.fp8(), "loud")(x.at[:, 37].mul(300), w)
        return loud + contraction(config.fp8(), "plain")(x, w)

    assert aqtlite.diagnose(function, X, W) == ()


def test_a_range_that_is_hardly_used_does_no_harm_on_grids_of_floats():
    quantized = aqtlite.quantize_function(
        jnp.matmul, config.fp8(delayed=True), params=1
    )
    state = quantized.gather(quantized.init_state(X, W), X, W)
    call = lambda x, w: quantized.evaluate(state, (x, w), {})  # noqa: E731
    assert aqtlite.diagnose(call, X / 100, W) == ()


def test_an_operand_that_is_worse_than_others():
    def two(x, w):
        noisy = config.update(nearest(), {"fwd.lhs.calib_shared_axes": "per_tensor"})
        first = contraction(nearest(), "a")(x, w) + contraction(nearest(), "b")(x, w)
        return first + contraction(noisy, "c")(x.at[0].mul(40), w)

    (one,) = aqtlite.diagnose(two, X, W)
    assert one.path == "c" and "same operand of other contractions" in one.what


def test_a_calibration_without_statistics():
    quantized = aqtlite.quantize_function(jnp.matmul, config.static_int8(), params=1)
    state = quantized.init_state(X, W)
    call = lambda state, x, w: quantized.evaluate(state, (x, w), {})  # noqa: E731
    found = aqtlite.diagnose(call, state, X, W)
    lost = [one for one in found if "no statistics" in one.what]
    assert [one.operand for one in lost] == ["fwd.lhs"]
    assert lost[0].severity == "error" and "calibrate(" in lost[0].remedy


def test_a_delayed_scale_that_is_saturated_or_unused():
    delayed = {
        "fwd.lhs.calibration": calibration.DelayedScaling(),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    cfg = config.update(nearest(), delayed)
    quantized = aqtlite.quantize_function(jnp.matmul, cfg, params=1)
    state = quantized.init_state(X, W)
    for _ in range(2):
        _, state = quantized(state, X, W)
    tapped = aqtlite.tap(lambda x, w: quantized.evaluate(state, (x, w), {}))
    assert aqtlite.diagnose(tapped(X, W)[1]) == ()
    taps = tapped(8 * X, W)[1]
    (one,) = aqtlite.diagnose(taps)
    assert one.operand == "fwd.lhs" and "the range is saturated" in one.what
    assert "calibration.AbsMax()" in one.remedy
    one, *_ = aqtlite.diagnose(tapped(X / 100, W)[1])
    assert "most of the grid is not used" in one.what
    drifting = aqtlite.diagnose({0: tapped(X / 8, W)[1], 100: taps})
    (one,) = (x for x in drifting if "drifts" in x.what)
    assert one.severity == "warning" and "at step 100" in one.what


def test_a_scale_that_overflows():
    wide = {"fwd.lhs.calibration": calibration.AbsMax(clipping_scale=100.0)}
    cfg = config.update(nearest(), wide)
    found = aqtlite.diagnose(contraction(cfg), 1e37 * X, W)
    lost = [one for one in found if "overflows" in one.what]
    assert [one.operand for one in lost] == ["fwd.lhs"]


def test_two_layers_with_one_noise():
    cfg, key = config.fully_quantized(), jax.random.key(0)

    def gradients(keys):
        def loss(w, x):
            x = jnp.tanh(contraction(cfg, "first", key=keys[0])(x, w))
            return jnp.square(contraction(cfg, "second", key=keys[1])(x, w)).sum()

        return aqtlite.diagnose(jax.grad(loss), normal((64, 64)), X)

    same = [one for one in gradients([key, key]) if "same noise" in one.what]
    assert {one.operand for one in same} == {"drhs.lhs"}
    assert "fold_in" in same[0].remedy
    keys = [jax.random.fold_in(key, i) for i in range(2)]
    assert not [one for one in gradients(keys) if "same noise" in one.what]


def test_a_contraction_that_is_too_small():
    (one,) = aqtlite.diagnose(CONTRACT, X[:, :8], W[:8])
    assert (one.operand, one.severity) == ("", "note")
    assert "too small to gain: 8 products" in one.what
    assert not remedied(one).is_quantized
    quantized = aqtlite.quantize_function(jnp.matmul, nearest(), params=1)
    (one,) = aqtlite.diagnose(quantized, X[:, :8], W[:8])
    assert "cfg=None" in one.remedy and "min_size" in one.remedy


def test_elements_that_are_rounded_to_zero():
    x = jnp.where(jax.random.uniform(jax.random.key(3), X.shape) > 0.8, 300.0, X)
    (one,) = found_in(x, W)
    assert "% of the elements are rounded to zero" in one.what


def test_what_cannot_be_diagnosed():
    with pytest.raises(TypeError, match="diagnose takes the taps"):
        aqtlite.diagnose([1])
    with pytest.raises(ValueError, match="of no step"):
        aqtlite.diagnose({})

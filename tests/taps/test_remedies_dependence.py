"""Remedies of `aqtlite.diagnose` let results see nothing that they did not see before.

Each one that is printed is pasted word for word: the call runs, its result is another,
and no worse, and what was causal, or independent of the batch, stays so.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import Rule, calibration, config, numerics
from aqtlite.flax import AqtEinsum
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.testing import assert_causal, assert_independent
from tests.common import mostly_slow, normal

pytestmark = pytest.mark.code("quick")

NAMES = {
    "aqtlite": aqtlite,
    "calibration": calibration,
    "config": config,
    "numerics": numerics,
}
X = normal((2, 8, 64))
SEEN = jnp.tril(jnp.ones((8, 8), bool))
LOUD = jnp.ones(64).at[4].set(500.0)
WEIGHTS = normal((64, 64), 1), normal((64, 64), 2)
AFFINE = config.static_int8("max", affine=True)


def fixed(magnitude, operands="fwd.lhs"):
    changes = {
        f"{operands}.calibration": calibration.Constant(magnitude),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    return config.update(config.fully_quantized(), changes)


FIXED_RANGE = {
    "fwd.lhs.numerics": numerics.IntAffine(bits=8),
    "fwd.lhs.calibration": calibration.ConstantRange(min=0, max=1),
    "fwd.lhs.calib_shared_axes": "per_tensor",
}
TERNARY = {
    "fwd.lhs.numerics": numerics.IntSymmetric(bits=2),
    "fwd.lhs.calibration": calibration.AbsMean(),
}
PRESETS = {
    "fully_quantized": config.fully_quantized(),
    "four_bits": config.fully_quantized(fwd_bits=4),
    "two_bits": config.fully_quantized(fwd_bits=2),
    "ternary": config.update(config.fully_quantized(), TERNARY),
    "w4a8": config.w4a8(),
    "weight_only": config.weight_only(8),
    "fp8": config.fp8(),
    "fp8_delayed": config.fp8(delayed=True),
    "nvfp4": config.nvfp4(),
    "static_int8": config.static_int8(),
    "affine": AFFINE,
    "lsq4": config.lsq(4),
    "lsq2": config.lsq(2),
    "fixed_low": fixed(1.0),
    "fixed_high": fixed(1000.0),
    "fixed_range": config.update(config.fully_quantized(), FIXED_RANGE),
}
"""Of whole models."""


def probabilities(x):
    x = jnp.tanh(x / 4)  # Not of one element alone, if x is loud.
    return jax.nn.softmax(jnp.where(SEEN, x @ jnp.swapaxes(x, 1, 2) / 8, -1e30))


def with_rules(function):
    """Makes calls of a function that rules quantize, with states of earlier batches."""

    def build(cfg, earlier):
        if cfg is None:
            return lambda x: function(WEIGHTS, x)
        quantized = aqtlite.quantize_function(function, cfg, params=0)
        state = quantized.init_state(WEIGHTS, earlier)
        if jax.tree.leaves(state):
            state = quantized.gather(state, WEIGHTS, earlier)
        return lambda x: quantized.evaluate(state, (WEIGHTS, x), {})

    return build


@with_rules
def mlp(weights, x):
    first, second = weights
    return jax.nn.relu(x @ first) @ second


@with_rules
def attention(weights, x):
    return jnp.einsum("bts,bsd->btd", probabilities(x), x * LOUD)


def bare(cfg, earlier):
    """Probabilities times values in a bare function."""
    return lambda x: aqtlite.einsum("bts,bsd->btd", probabilities(x), x * LOUD, cfg=cfg)


def bare_on_the_left(cfg, earlier):
    return lambda x: aqtlite.einsum(
        "bsd,bts->bdt", x * LOUD, probabilities(x), cfg=cfg
    ).swapaxes(1, 2)


def dense(cfg, earlier):
    dot_general = aqtlite.make_dot_general(cfg)
    return lambda x: dot_general(x, WEIGHTS[0], (((2,), (0,)), ((), ())))


def in_heads(x):
    return x.reshape(2, 8, 2, 32)


def linen(cfg, earlier):
    """Flax's attention with injected functions."""

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            einsum = {} if cfg is None else AqtEinsum(cfg)
            q, v = in_heads(x), in_heads(x * LOUD)
            named = ("qk_attn_weights_einsum", "attn_weights_value_einsum")
            how = {} if cfg is None else dict.fromkeys(named, einsum)
            return nn.dot_product_attention(q, q, v, mask=SEEN, **how).reshape(x.shape)

    model = Attention()
    variables = model.init(jax.random.key(0), earlier)
    if "aqt_stats" in variables:
        _, gathered = model.apply(variables, earlier, mutable=["aqt_stats"])
        variables = {**variables, **gathered}
    return lambda x: model.apply(variables, x)


def nnx_functions(cfg, earlier):
    def call(x):
        einsum = jnp.einsum if cfg is None else aqt_nnx.AqtEinsum(cfg)
        q, v = in_heads(x), in_heads(x * LOUD)
        scores = einsum("...qhd,...khd->...hqk", q, q)
        seen = jax.nn.softmax(jnp.where(SEEN, scores / 6, -1e30))
        return einsum("...hqk,...khd->...qhd", seen, v).reshape(x.shape)

    return call


RULES = mlp, attention


def decibels(exact, other):
    exact, other = (np.asarray(x, np.float64) for x in (exact, other))
    errors = np.square(other - exact).sum()
    return min(10 * np.log10(np.square(exact).sum() / (errors + 1e-20)), 80)


def holds(assertion, call, x):
    try:
        assertion(call, x)
    except (AssertionError, ValueError):  # ValueError: all of the result is zero.
        return False
    return True


def pasted(build, finding, text, cfg):
    """The config, or rules, with a remedy of a finding."""
    made = eval(text, {**NAMES, "cfg": cfg})
    assert made != cfg, text
    if build not in RULES:
        return made
    others = Rule(cfg=cfg, is_required=False)
    path = re.escape(finding.path)
    return [made if isinstance(made, Rule) else Rule(path=path, cfg=made), others]


def swept(build, cfg, x=X, earlier=X):
    """Pastes all remedies; returns the findings."""
    exact, before = jax.jit(build(None, earlier))(x), build(cfg, earlier)
    was = [one for one in (assert_causal, assert_independent) if holds(one, before, x)]
    found = [one for one in aqtlite.diagnose(before, x) if one.severity != "note"]
    old, seen = jax.jit(before)(x), set()
    for one in found:
        for text in one.remedy.partition("  #")[0].split(", or "):
            if (one.path, text) in seen:
                continue
            seen.add((one.path, text))
            is_other = "smoothing" in text or "rotation" in text
            batch = x if is_other else earlier  # Calibrated again, as it says.
            after = build(pasted(build, one, text, cfg), batch)
            new = jax.jit(after)(x)
            assert not np.array_equal(new, old) or not old.any(), (str(one), text)
            same = jax.jit(build(cfg, x))(x) if is_other else old
            gain = decibels(exact, new) - decibels(exact, same)
            assert gain > -0.5, (gain, str(one), text)
            for assertion in was:
                assertion(after, x)
    return found


@pytest.mark.parametrize("name", mostly_slow(PRESETS, "static_int8", "lsq4", "affine"))
def test_louder_than_earlier_batches(name):
    found = swept(mlp, PRESETS[name], 30 * X)
    if name in ("static_int8", "affine", "lsq4", "lsq2", "fixed_low", "fixed_range"):
        assert any("is saturated" in one.what for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("factor", [1.0, 1 / 300])
def test_louder_channels_and_quieter_batches(name, factor):
    swept(mlp, PRESETS[name], factor * X * LOUD)


ACTIVATIONS = [name for name in PRESETS if name != "weight_only"]


@pytest.mark.parametrize("name", mostly_slow(ACTIVATIONS, "fully_quantized"))
def test_attention_by_rules(name):
    found = swept(attention, PRESETS[name])
    assert found or name not in ("fully_quantized", "four_bits", "w4a8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_attention_by_rules_on_louder_batches(name):
    swept(attention, PRESETS[name], 30 * X)


@pytest.mark.parametrize(
    ("build", "side"), [(bare, "rhs"), (bare_on_the_left, "lhs"), (dense, "rhs")]
)
@pytest.mark.parametrize(
    "name", mostly_slow(["fully_quantized", "four_bits", "fixed_low"], "fixed_low")
)
def test_bare_functions(build, side, name):
    cfg = PRESETS[name]
    if build is not dense:
        cfg = config.for_values(cfg, side)
    found = swept(build, cfg)
    assert found or build is dense


def test_values_of_attention():
    found = swept(bare, config.for_values(config.fully_quantized()))
    assert [one.operand for one in found] == ["fwd.rhs"]
    assert "channel 4 of axis 2" in found[0].what


@pytest.mark.parametrize(
    "name", mostly_slow(["fully_quantized", "four_bits", "w4a8", "weight_only"], "w4a8")
)
@pytest.mark.parametrize("build", [linen, nnx_functions])
def test_injected_attention(build, name):
    assert swept(build, PRESETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["static_int8", "affine", "lsq4", "fixed_low"])
def test_injected_attention_with_known_ranges(name):
    assert swept(linen, PRESETS[name], 30 * X)


@pytest.mark.parametrize("magnitude", [1.0, 1000.0])
def test_a_fixed_range_is_named(magnitude):
    found = swept(dense, fixed(magnitude))
    (one,) = (one for one in found if one.operand == "fwd.lhs")
    what = "the range is saturated" if magnitude == 1 else "the grid is not used"
    assert what in one.what and "the fixed range" in one.what


def test_a_fixed_range_may_drift():
    tapped = aqtlite.tap(dense(fixed(50.0), X))
    found = aqtlite.diagnose({0: tapped(X)[1], 9: tapped(10 * X)[1]})
    (one,) = (one for one in found if "drifts" in one.what)
    assert one.severity == "warning" and "AbsMax" in one.remedy

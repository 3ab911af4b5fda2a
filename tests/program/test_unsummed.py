"""Contractions of functions by rules in which nothing is summed: exact, and told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from jax import export, lax

import aqtlite
from aqtlite import Rule, config, quantize_function
from aqtlite.program import unsummed
from tests.common import mostly_slow, normal

# Bits tell that the equations of the float function run.
pytestmark = pytest.mark.code("quick")

PRESETS = {
    name: preset.make()
    for name, preset in config.presets().items()
    if preset.make().is_quantized
}
INT8 = config.fully_quantized()
X, W = normal((2, 6, 16), 1), normal((16, 16), 2)
IMAGE = normal((1, 4, 4, 8), 3)
TOKENS = jnp.array([[1, 5, 0], [15, 2, 2]])
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def angles(w, x):
    """RoPE with positions in float, as bonsai writes it."""
    positions = jnp.arange(6.0)[None] + x[0, 0, 0]
    frequencies = 1.0 / 10000 ** (jnp.arange(0, 16, 2) / 16)
    return jnp.einsum("bt,k->btk", positions, frequencies)


SUM_NOTHING = {
    "RMSNorm": lambda w, x: jnp.einsum("...k,k->...k", x, w[0]),  # MaxText
    "RoPE": angles,
    "tensordot": lambda w, x: jnp.tensordot(w[0], x[0, 0], 0),
    "outer": lambda w, x: jnp.einsum("i,j->ij", w[0], x[0, 0]),
    "batch axes": lambda w, x: lax.dot_general(
        x[0], w[:6], (((), ()), ((0, 1), (0, 1)))
    ),
    "low rank": lambda w, x: jnp.einsum("btm,me->btme", x, w),
}
SUM_ONE = {
    "a layer of a scalar": lambda w, x: x[..., :1] @ w[:1],
    "einsum": lambda w, x: jnp.einsum("btcm,ck->btmk", x[:, :, None], w[:1]),
    "depthwise": lambda w, x: lax.conv_general_dilated(
        IMAGE * x[0, 0, 0],
        w[:1, None, None, :8],
        (1, 1),
        "SAME",
        feature_group_count=8,
        **NHWC,
    ),
    "experts": lambda w, x: lax.ragged_dot(
        x[0, :, :1], w[:3, None], jnp.array([1, 2, 3], jnp.int32)
    ),
}
MOVE_DATA = {
    "a lookup": lambda w, x: jax.nn.one_hot(TOKENS, 16) @ w,
    "of an argument": lambda w, x: (
        (x[0, :, :1].astype(int) == jnp.arange(16)).astype(x.dtype) @ w
    ),
    "patches": lambda w, x: lax.conv_general_dilated_patches(
        IMAGE * w[0, 0], (2, 2), (2, 2), "VALID", **NHWC
    ),
    "a permutation": lambda w, x: x @ jnp.eye(16)[::-1],
}
CASES = {
    name: (function, reason)
    for reason, functions in (
        (unsummed.SUMS_NOTHING, SUM_NOTHING),
        (unsummed.SUMS_ONE, SUM_ONE),
        (unsummed.MOVES_DATA, MOVE_DATA),
    )
    for name, function in functions.items()
}


def with_gradients(function):
    def run(*args):
        out, vjp = jax.vjp(function, *args)
        return out, vjp(jnp.cos(out))

    return jax.jit(run)


@pytest.mark.parametrize("name", CASES)
def test_stays_in_float(name, monkeypatch):
    """The values and gradients of the function, without an error or a warning."""
    function, reason = CASES[name]
    warned = []
    monkeypatch.setattr(logging, "warning", lambda *args: warned.append(args))
    quantized = quantize_function(function, INT8, params=0, strict=True)
    contractions = quantized.plan(W, X).contractions
    assert {one.why_float for one in contractions} == {reason}
    got, wanted = (with_gradients(one)(W, X) for one in (quantized, function))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert not warned


@pytest.mark.parametrize(
    "preset", mostly_slow(PRESETS, "fully_quantized", "static_int8", "lsq", "nvfp4")
)
def test_in_every_preset(preset):
    """Beside a contraction that is quantized, whose state is the only one."""

    def model(w, x):
        x = jnp.einsum("...k,k->...k", x, w[0])
        x = x + (x[..., :1] @ w[:1]) + jax.nn.one_hot(TOKENS[:, :1], 16) @ w
        with jax.named_scope("layer"):
            return x @ w

    quantized = quantize_function(model, PRESETS[preset], params=0, strict=True)
    plan = quantized.plan(W, X)
    assert [one.path for one in plan.quantized()] == ["layer"]
    assert [one.why_float for one in plan.left_float()] == [
        unsummed.SUMS_NOTHING,
        unsummed.SUMS_ONE,
        unsummed.MOVES_DATA,
    ]
    state = quantized.init_state(W, X) if quantized.has_state else {}
    assert {path for entries in state.values() for path in entries} <= {"layer"}


def test_a_rule_that_says_float_is_named():
    plan = aqtlite.plan(SUM_NOTHING["RoPE"], W, X, rules=Rule(cfg=None))
    assert [one.why_float for one in plan.contractions] == ["rule 0 leaves it so"]


def test_is_not_missed_by_strict_rules():
    """Without a rule for it, either."""

    def model(w, x):
        x = jnp.einsum("...k,k->...k", x, w[0])
        with jax.named_scope("layer"):
            return x @ w

    rules = Rule(path="layer", cfg=INT8)
    quantized = quantize_function(model, rules, params=0, strict=True)
    assert len(quantized.plan(W, X).quantized()) == 1


def test_conversion_reports_why():
    def model(params, x):
        x = jnp.einsum("...k,k->...k", x, params["scale"]) + x[..., :1] @ params["one"]
        return (x + jax.nn.one_hot(TOKENS[:, :1], 16) @ params["table"]) @ params["w"]

    params = {"scale": W[0], "one": W[1:2], "table": W + 1, "w": W}
    quantized = quantize_function(model, INT8, params=0)
    reports = []
    serve, serving = aqtlite.convert_function(
        quantized, params, X, strict=True, report=reports.append
    )
    why = {one.path: one.why for one in reports[0].parameters}
    assert why == {
        "one": unsummed.SUMS_ONE,
        "scale": unsummed.SUMS_NOTHING,
        "table": unsummed.MOVES_DATA,
        "w": "",
    }
    assert f"in float: {unsummed.MOVES_DATA}" in str(reports[0])
    wanted = jax.jit(quantized)(params, X)
    np.testing.assert_array_equal(jax.jit(serve)(serving, X), wanted)


def test_nothing_to_freeze_names_the_reason():
    quantized = quantize_function(SUM_ONE["a layer of a scalar"], INT8, params=0)
    with pytest.raises(ValueError, match=f"nothing to freeze.*\n.*{unsummed.SUMS_ONE}"):
        aqtlite.convert_function(quantized, W, X)


def test_a_symbolic_size_is_not_one():
    (size,) = export.symbolic_shape("k")
    shapes = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, size), (size, 3))
    )
    plan = aqtlite.plan(lambda w, x: x @ w, *reversed(list(shapes)), rules=INT8)
    assert len(plan.quantized()) == 1

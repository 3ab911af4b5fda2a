"""Contractions in the rules of `jax.custom_vjp` and `jax.custom_jvp`."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import aqtlite
from aqtlite import Rule, config, quantize_function
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.flax import quantize_model
from aqtlite.jaxpr import sites
from tests.common import MATMUL, mostly_slow, nearest, normal, relative_error
from tests.flax.support import init
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
X, W, STEPS, EXPERTS = map(normal, ((8, 16), (16, 32), (3, 5, 16), (3, 16, 8)))


def with_vjp(function, forward, backward):
    made = jax.custom_vjp(function)
    made.defvjp(forward, backward)
    return made


def matmul(x, w):
    return x @ w


def steps(x, w):
    return lax.scan(lambda _, row: (None, row @ w), None, x)[1]


def steps_backward(saved, g):
    x, w = saved
    dx = lax.scan(lambda _, row: (None, row @ w.T), None, g)[1]

    def add(dw, of_step):
        return dw + of_step[0].T @ of_step[1], None

    return dx, lax.scan(add, jnp.zeros_like(w), (x, g))[0]


def recomputing(saved, g):
    x, w = saved
    g = g * (1 - jnp.tanh(x @ w) ** 2)
    return g @ w.T, x.T @ g


def in_bfloat16(x, w):
    return matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32)


def in_bfloat16_backward(saved, g):
    x, w, g = (one.astype(jnp.bfloat16) for one in (*saved, g))
    return (g @ w.T).astype(jnp.float32), (x.T @ g).astype(jnp.float32)


USUAL = with_vjp(
    matmul, lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g)
)


@jax.custom_jvp
def forward_mode(x, w):
    return x @ w


@forward_mode.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


CASES = {
    "usual": (USUAL, X, W),
    "custom_jvp": (forward_mode, X, W),
    "transposed": (
        with_vjp(
            matmul,
            lambda x, w: (x @ w, (x, w.T)),
            lambda r, g: (g @ r[1], (g.T @ r[0]).T),
        ),
        X,
        W,
    ),
    "einsum": (
        with_vjp(
            matmul,
            lambda x, w: (x @ w, (x, w)),
            lambda r, g: (
                jnp.einsum("btn,kn->btk", g, r[1]),
                jnp.einsum("btk,btn->kn", r[0], g),
            ),
        ),
        STEPS,
        W,
    ),
    "weight first": (
        with_vjp(
            lambda x, w: w.T @ x.T,
            lambda x, w: (w.T @ x.T, (x, w)),
            lambda r, g: (g.T @ r[1].T, (g @ r[0]).T),
        ),
        X,
        W,
    ),
    "batched": (
        with_vjp(
            matmul,
            lambda x, w: (x @ w, (x, w)),
            lambda r, g: (
                jnp.einsum("etn,ekn->etk", g, r[1]),
                jnp.einsum("etn,etk->ekn", g, r[0]),
            ),
        ),
        STEPS,
        EXPERTS,
    ),
    "mapped": (jax.vmap(USUAL, (0, None)), STEPS, W),
    "in a scan": (
        lambda x, w: lax.scan(lambda _, row: (None, USUAL(row, w)), None, x)[1],
        STEPS,
        W,
    ),
    "with a scan": (
        with_vjp(steps, lambda x, w: (steps(x, w), (x, w)), steps_backward),
        STEPS,
        W,
    ),
    "in a checkpoint": (jax.checkpoint(USUAL), X, W),
    "in bfloat16": (
        with_vjp(
            in_bfloat16, lambda x, w: (in_bfloat16(x, w), (x, w)), in_bfloat16_backward
        ),
        X,
        W,
    ),
    "by jax.vjp": (
        with_vjp(
            matmul,
            lambda x, w: (x @ w, (x, w)),
            lambda r, g: jax.vjp(matmul, *r)[1](g),
        ),
        X,
        W,
    ),
    "recomputing": (
        with_vjp(
            lambda x, w: jnp.tanh(x @ w),
            lambda x, w: (jnp.tanh(x @ w), (x, w)),
            recomputing,
        ),
        X,
        W,
    ),
}


def gradients_of(function):
    """Gradients of a function of weights and inputs."""
    return jax.grad(lambda w, x: jnp.sin(function(w, x)).sum(), (0, 1))


def in_float(function, *args):
    """Contractions in a program that no part of a quantized one makes."""
    found = sites.find(jax.make_jaxpr(function)(*args)).contractions
    return [one for one in found if "aqtlite" not in one.scope.path.split("/")]


@pytest.mark.parametrize("case", mostly_slow(CASES, "usual", "custom_jvp", "mapped"))
def test_gradients_of_the_rule_are_quantized(case):
    function, x, w = CASES[case]
    quantized = quantize_function(
        lambda w, x: function(x, w), INT8, params=0, strict=True
    )
    (one,) = quantized.plan(w, x).contractions
    made_by = "jax.custom_jvp" if case == "custom_jvp" else "jax.custom_vjp"
    assert one.rule_of_gradient == made_by
    assert not in_float(gradients_of(quantized), w, x)
    found = jax.jit(gradients_of(quantized))(w, x)
    wanted = jax.jit(gradients_of(lambda w, x: function(x, w)))(w, x)
    for one, other in zip(found, wanted, strict=True):
        error = jnp.linalg.norm(one - other) / jnp.linalg.norm(other)
        assert 1e-3 < error < 0.06


@pytest.mark.parametrize("case", ["usual", "weight first"])
def test_they_are_contracted_by_the_configs_of_the_gradients(case):
    """With 8 bits for inputs and 4 for weights, which are on either side."""
    few = nearest(4, use_fwd_quant=False)
    cfg = config.DotGeneral(fwd=INT8.fwd, dlhs=INT8.dlhs, drhs=few.drhs)
    function, *_ = CASES[case]
    quantized = quantize_function(lambda w, x: function(x, w), cfg, params=0)
    (record,) = json.loads(quantized.plan(W, X).to_json())
    text = "dlhs int8 x int8, drhs int4 x int4, in its jax.custom_vjp"
    assert record["gradients_in"] == text
    g = normal((8, 32), seed=5)
    dot = aqtlite.make_dot_general(
        config.DotGeneral(fwd=config.update(INT8.dlhs, {"rhs.use_fwd_quant": False}))
    )

    @jax.jit
    def both(w, x, g):
        cotangent = g if case == "usual" else g.T
        return jax.vjp(quantized, w, x)[1](cotangent), dot(g, w.T, MATMUL), x.T @ g

    (dw, dx), wanted_dx, dw_in_float = both(W, X, g)
    assert_bits(dx, wanted_dx)
    error = jnp.linalg.norm(dw - dw_in_float) / jnp.linalg.norm(dw_in_float)
    assert 0.05 < error < 0.3


UNUSUAL = with_vjp(
    matmul, lambda x, w: (x @ w, (x, w)), lambda r, g: (jnp.sin(g) @ g.T @ r[0], W * 2)
)


def test_what_is_not_recognized_stays_in_float_and_is_in_the_plan():
    def function(w, x):
        with jax.named_scope("layer"):
            return UNUSUAL(x, w)

    quantized = quantize_function(function, INT8, params=0)
    plan = quantized.plan(W, X)
    assert [one.path for one in plan.contractions] == [
        "layer",
        "layer/gradient",
        "layer/gradient#1",
    ]
    assert plan.summary() == "3 contractions: 1 quantized, 2 in float"
    assert [one.lhs.kind for one in plan.left_float()] == ["gradient", "gradient"]
    assert plan.left_float()[1].rhs.kind == "activation"
    assert "as its jax.custom_vjp has it" in repr(plan)
    assert_bits(jax.jit(gradients_of(quantized))(W, X)[0], W * 2)

    strict = quantize_function(function, INT8, params=0, strict=True)
    with pytest.raises(ValueError, match="layer/gradient#1: it is in the rule"):
        strict(W, X)
    rules = [Rule(path=".*/gradient", cfg=None), Rule(cfg=INT8)]
    with pytest.raises(ValueError, match="1 contractions stay in float"):
        quantize_function(function, rules, params=0, strict=True)(W, X)
    rules = [Rule(path=".*/gradient(#.*)?", cfg=None), Rule(cfg=INT8)]
    named = quantize_function(function, rules, params=0, strict=True)
    assert_bits(named(W, X), quantized(W, X))


def test_a_function_that_a_rule_leaves_in_float_keeps_its_rule():
    rules = [Rule(path="first", cfg=None), Rule(path="second", cfg=INT8)]

    def function(w, x):
        with jax.named_scope("first"):
            x = USUAL(x, w)
        with jax.named_scope("second"):
            return x @ w.T

    quantized = quantize_function(function, rules, params=0, strict=True)
    assert len(in_float(gradients_of(quantized), W, X)) == 3


def test_rules_that_fail_do_so_where_they_are_used():
    def backward(saved, g):
        raise NotImplementedError("no gradient")

    function = with_vjp(matmul, lambda x, w: (x @ w, ()), backward)
    quantized = quantize_function(lambda w, x: function(x, w), INT8, params=0)
    assert quantized(W, X).shape == (8, 32)
    with pytest.raises(NotImplementedError, match="no gradient"):
        gradients_of(quantized)(W, X)


def test_arrays_that_a_function_closes_over_in_a_scan_inside_vmap():
    """There, JAX no longer says which inputs they are."""
    factors = 1 + normal((16,), 3) ** 2

    def scaled(x):
        return (x * factors) @ W

    function = with_vjp(
        scaled, lambda x: (scaled(x), None), lambda _, g: ((g @ W.T) * factors,)
    )

    def scan(x):
        return lax.scan(lambda _, row: (None, function(row)), None, x)[1]

    plain, mapped = (
        quantize_function(one, INT8, strict=True) for one in (function, jax.vmap(scan))
    )
    assert not in_float(jax.grad(lambda x: jnp.sin(mapped(x)).sum()), STEPS)
    got, wanted = (
        jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(STEPS) for f in (mapped, plain)
    )
    assert relative_error(got, wanted) < 1e-6


def test_axes_by_number_are_refused():
    cfg = config.update(INT8, {"dlhs.lhs.calib_shared_axes": (1,)})
    quantized = quantize_function(lambda w, x: USUAL(x, w), cfg, params=0)
    with pytest.raises(ValueError, match=r"dlhs\.lhs\.calib_shared_axes=\(1,\)"):
        quantized(W, X)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return USUAL(x, self.param("kernel", nn.initializers.normal(), W.shape))


class NnxLayer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(W)

    def __call__(self, x):
        return USUAL(x, self.kernel[...])


def test_models_by_rules():
    """With static ranges, whose statistics a rule that contracts again does not see."""
    model = quantize_model(LinenLayer(), INT8, strict=True)
    variables = init(model, X)

    def loss(variables):
        return jnp.sin(model.apply(variables, X)).sum()

    assert not in_float(jax.grad(loss), variables)

    module = aqt_nnx.quantize_model(NnxLayer(), INT8, strict=True)
    graph, state = nnx.split(module)

    def nnx_loss(state):
        return jnp.sin(nnx.merge(graph, state)(X)).sum()

    assert not in_float(jax.grad(nnx_loss, allow_int=True), state)
    (one,) = aqt_nnx.plan(module, X).contractions
    assert one.rule_of_gradient == "jax.custom_vjp"


def test_static_ranges_are_those_of_the_function():
    function, x, w = CASES["recomputing"]
    cfg = config.static_int8()
    quantized = quantize_function(
        lambda w, x: function(x, w), cfg, params=0, strict=True
    )
    state = quantized.gather(quantized.init_state(w, x), w, x)

    def loss(w, x):
        out, after = quantized(state, w, x)
        return jnp.sin(out).sum(), after

    assert not in_float(jax.grad(loss, has_aux=True), w, x)
    _, after = jax.jit(jax.grad(loss, has_aux=True))(w, x)
    (entry,) = after["aqt_stats"].values()
    assert entry["lhs"].batches.item() == 2.0

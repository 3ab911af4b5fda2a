"""Models by rules, and with injected functions, whose bits depend on values alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.common import mostly_slow, normal
from tests.flax.support import init

INT8 = config.fully_quantized()
RULES = [Rule(path=".*head", cfg=None), Rule(cfg=INT8)]
X = normal((5, 37))


class Linen(nn.Module):
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x):
        given = None if self.cfg is None else AqtDotGeneral(self.cfg)
        x = nn.gelu(nn.Dense(24, dot_general=given, dtype="bfloat16")(x))
        x = nn.LayerNorm()(x)
        return nn.log_softmax(nn.Dense(17, name="head")(x))


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(37, 24, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.LayerNorm(24, rngs=rngs)
        self.head = nnx.Linear(24, 17, rngs=rngs)

    def __call__(self, x):
        return nnx.log_softmax(self.head(self.norm(nnx.gelu(self.up(x)))))

    def entropy(self, y):
        return -(jnp.exp(y) * y).sum(-1)


def of_linen():
    model = quantize_model(Linen(), RULES, invariant=True)
    variables = init(model, X)
    return model.apply, variables, lambda x: convert(model, variables, x), model.apply


def of_injected():
    model = Linen(INT8)
    apply = aqtlite.invariant(model.apply)
    variables = init(model, X)
    return apply, variables, lambda x: convert(model, variables, x), apply


def of_nnx():
    graph, state = nnx.split(aqt_nnx.quantize_model(Nnx(), RULES, invariant=True))

    def apply(graph, state, x):
        return nnx.merge(graph, state)(x)

    def converted(x):
        return nnx.split(aqt_nnx.convert(nnx.merge(graph, state), x))

    def serve(serving, x):
        return nnx.merge(*serving)(x)

    return functools.partial(apply, graph), state, converted, serve


def of_function():
    model = Linen()
    variables = init(model, X)
    function = aqtlite.quantize_function(model.apply, RULES, params=0, invariant=True)
    serve, serving = aqtlite.convert_function(function, variables, X)
    return function, variables, lambda x: serving, serve


MODELS = {
    "linen": of_linen,
    "nnx": of_nnx,
    "function": of_function,
    "injected": of_injected,
}


@pytest.mark.parametrize("name", mostly_slow(MODELS, "linen"))
def test_a_row_is_the_same_in_training_and_in_serving(name):
    apply, variables, converted, serve = MODELS[name]()

    def loss(variables, x):
        out = apply(variables, x)
        return jnp.square(out).sum(), out

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))
    (_, whole), _ = compiled(variables, X)
    alone = jax.jit(apply)(variables, X[3:4])
    np.testing.assert_array_equal(alone[0], whole[3])
    serving = converted(X)
    if name == "nnx":
        served = jax.jit(serve)(serving, X[3:4])
    else:
        served = aqtlite.compile_serving(serve, serving, X[3:4])(X[3:4])
    np.testing.assert_array_equal(served[0], whole[3])


def test_methods_that_contract_nothing_are_invariant():
    model = aqt_nnx.quantize_model(Nnx(), RULES, invariant=True)
    y = jnp.log(jnp.abs(X) + 0.1)
    out = model.entropy(y)
    wanted = aqtlite.invariant(lambda y: -(jnp.exp(y) * y).sum(-1))(y)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.slow
def test_calibrates_and_learns_in_invariant_forms():
    rules = Rule(cfg=config.static_int8())
    model = quantize_model(Linen(), rules, invariant=True)
    variables = init(model, X)
    variables = aqtlite.flax.calibrate(model, variables, [(X,), (2 * X,)])
    whole = jax.jit(model.apply)(variables, X)
    serving = convert(model, variables, X)
    alone = jax.jit(model.apply)(serving, X[3:4])
    np.testing.assert_array_equal(alone[0], whole[3])


def test_the_plan_shows_what_is_replaced_and_what_is_refused():
    def function(w, x):
        with jax.named_scope("gate"):
            return jax.scipy.special.digamma(jnp.exp(x @ w))

    quantized = aqtlite.quantize_function(function, INT8, invariant=True)
    w = normal((37, 4))
    text = repr(quantized.plan(w, X))
    assert "Invariant: 1 operations in forms of their own (1 exp)" in text
    refused = "gate: digamma has no such form"
    assert f"refused: {refused}" in text
    with pytest.raises(ValueError, match=refused):
        quantized(w, X)


@pytest.mark.slow
def test_an_invariant_model_inside_of_another_needs_it_too():
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = aqt_nnx.quantize_model(Nnx(), RULES, invariant=True)

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(ValueError, match="'inner' in it is invariant"):
        aqt_nnx.quantize_model(Outer(), RULES)
    model = aqt_nnx.quantize_model(Outer(), invariant=True)
    assert (model(X)[3] == model(X[3:4])[0]).all()

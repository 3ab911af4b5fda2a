"""Haiku's transformed functions, quantized by rules on the names of their modules."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import Rule, config
from tests.common import normal, quick_jit, relative_error

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()


def test_an_mlp():
    model = hk.transform(lambda x: hk.nets.MLP([16, 16, 4])(x))
    x = normal((8, 8), 1)
    params = quick_jit(model.init)(jax.random.key(0), x)
    rules = [Rule(path="mlp/linear_[01]", operands="weight", cfg=INT8)]
    planned = aqtlite.plan(model, params, None, x, rules=rules)
    assert [one.path for one in planned.quantized()] == [
        "mlp/linear_0",
        "mlp/linear_1",
    ]
    quantized = aqtlite.quantize_function(model.apply, rules, params=0)
    serve, serving = aqtlite.convert_function(quantized, params, None, x)

    @jax.jit
    def run(params, serving):
        return quantized(params, None, x), serve(serving, None, x)

    np.testing.assert_array_equal(*run(params, serving))

    @quick_jit
    def gradients(params):
        return [
            jax.grad(lambda p, apply=apply: jnp.sum(apply(p, None, x) ** 2))(params)
            for apply in (quantized, model.apply)
        ]

    found, wanted = gradients(params)
    errors = jax.tree.map(relative_error, found, wanted)
    assert max(jax.tree.leaves(errors)) < 0.1
    assert errors["mlp/~/linear_0"]["w"] > 0


def test_a_recurrent_network():
    """`hk.dynamic_unroll` is a scan."""

    def unroll(xs):
        core = hk.LSTM(8)
        ys, _ = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
        return hk.Linear(4)(ys)

    model = hk.transform(unroll)
    xs = normal((5, 2, 8), 1)
    params = quick_jit(model.init)(jax.random.key(0), xs)
    quantized = aqtlite.quantize_function(model.apply, INT8, params=0, strict=True)
    planned = quantized.plan(params, None, xs)
    assert [one.path for one in planned.quantized()] == ["lstm/linear", "linear"]
    serve, serving = aqtlite.convert_function(quantized, params, None, xs, strict=True)
    assert list(serving["aqt"]) == ["lstm/linear", "linear"]
    np.testing.assert_array_equal(
        jax.jit(serve)(serving, None, xs), jax.jit(quantized)(params, None, xs)
    )


def test_a_model_with_state_and_rngs():
    """`hk.transform_with_state`: convolutions, batch statistics, dropout."""

    def net(x, is_training):
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv1D(8, 3)(x), is_training)
        x = hk.dropout(hk.next_rng_key(), 0.5 if is_training else 0.0, x)
        return hk.MultiHeadAttention(
            2, 4, w_init=hk.initializers.VarianceScaling(), model_size=8
        )(x, x, x)

    model = hk.transform_with_state(net)
    x, rng = normal((2, 5, 8), 1), jax.random.key(2)
    params, state = quick_jit(functools.partial(model.init, is_training=True))(
        jax.random.key(0), x
    )
    quantized = aqtlite.quantize_function(model.apply, INT8, params=0, strict=True)
    serve, serving = aqtlite.convert_function(quantized, params, state, rng, x, False)

    @jax.jit
    def run(params, serving):
        train = quantized(params, state, rng, x, True)
        wanted = quantized(params, state, rng, x, False)
        return train, wanted, serve(serving, state, rng, x, False)

    (train, updated), wanted, served = run(params, serving)
    jax.tree.map(np.testing.assert_array_equal, served, wanted)
    assert (train != wanted[0]).any()
    assert updated["batch_norm/~/mean_ema"]["counter"] == 1

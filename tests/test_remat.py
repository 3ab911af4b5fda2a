"""Checkpoint policies by the names of what is quantized."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, remat

DIMS = (((1,), (0,)), ((), ()))
DOT = aqtlite.make_dot_general(config.fully_quantized())


def layer(w, x):
    return jnp.tanh(DOT(jnp.tanh(x), w, DIMS))


def saved(function, *args):
    """The lines of what the backward pass of a function takes over."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        jax.ad_checkpoint.print_saved_residuals(function, *args)
    return [line for line in text.getvalue().splitlines() if "argument" not in line]


def test_save_quantized_keeps_integers_and_scales_alone():
    w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    policy = remat.save_quantized()
    lines = saved(jax.checkpoint(layer, policy=policy), w, x)
    named = [line.split("'")[1] for line in lines if "named" in line]
    assert sorted(named) == sorted(remat.OPERANDS)
    kinds = {line.split()[0] for line in lines}
    assert kinds == {"i8[2,8]", "i8[8,4]", "f32[2,1]", "f32[1,4]"}


@pytest.mark.parametrize(
    "policy", [None, remat.save_quantized(), remat.save_quantized(remat.SUMS)]
)
def test_policies_change_no_result(policy):
    w = jax.random.normal(jax.random.key(0), (8, 8))
    x = jax.random.normal(jax.random.key(1), (4, 8))

    def linear(w, x):
        # Float code between contractions may be fused in other ways.
        return DOT(x, w, DIMS)

    def gradient(layer):
        return jax.jit(jax.grad(lambda w: layer(w, layer(w, x)).sum()))(w)

    kept = gradient(jax.checkpoint(linear, policy=policy))
    np.testing.assert_array_equal(kept, gradient(linear))


@pytest.mark.parametrize("preset", [config.fully_quantized(), config.lsq()])
def test_one_traced_layer_is_differentiated_in_several_ways(preset):
    # The input of the first layer takes no gradient, that of the second one does, and
    # JAX traces a layer of one shape once.
    dot = aqtlite.make_dot_general(preset)
    w = jax.random.normal(jax.random.key(0), (256, 256))
    x = jax.random.normal(jax.random.key(1), (256, 256))
    states = aqtlite.statistics.init_states(preset, x, w, DIMS)
    states = states._replace(dlhs=(), drhs=())

    def layer(w, x, states):
        return dot(x, w, DIMS, states=states)

    def gradients(layer):
        def loss(w, states):
            return layer(w, layer(w, x, states), states).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(w, states)

    wanted = gradients(layer)
    for wrapped in (jax.checkpoint(layer), jax.jit(layer)):
        jax.tree.map(np.testing.assert_array_equal, gradients(wrapped), wanted)

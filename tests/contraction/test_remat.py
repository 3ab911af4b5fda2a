"""Checkpoint policies by the names of what is quantized."""

import contextlib
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, remat
from tests.common import mostly_slow, normal

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
    w = normal((8, 8))
    x = normal((4, 8), 1)

    def linear(w, x):
        # Float code between contractions may be fused in other ways.
        return DOT(x, w, DIMS)

    def gradient(layer):
        return jax.jit(jax.grad(lambda w: layer(w, layer(w, x)).sum()))(w)

    kept = gradient(jax.checkpoint(linear, policy=policy))
    np.testing.assert_array_equal(kept, gradient(linear))


@pytest.mark.parametrize(
    "preset",
    [
        config.fully_quantized(),
        pytest.param(config.lsq(), marks=pytest.mark.slow),
    ],
)
def test_one_traced_layer_is_differentiated_in_several_ways(preset):
    # The input of the first layer takes no gradient, that of the second one does, and
    # JAX traces a layer of one shape once.
    dot = aqtlite.make_dot_general(preset)
    w = normal((256, 256))
    x = normal((256, 256), 1)
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


P = jax.checkpoint_policies
POLICIES = {
    "nothing_saveable": P.nothing_saveable,
    "everything_saveable": P.everything_saveable,
    "dots_saveable": P.dots_saveable,
    "save_quantized": remat.save_quantized(),
    "save one operand": P.save_only_these_names(remat.RHS),
    "offload": P.save_and_offload_only_these_names(
        names_which_can_be_saved=[remat.SUMS],
        names_which_can_be_offloaded=list(remat.OPERANDS),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
PRESETS = {
    "unquantized": config.unquantized(),
    "weight_only": config.weight_only(4),
    "fully_quantized": config.fully_quantized(),
    "qat": config.qat(),
    "w4a8": config.w4a8(),
    "static_int8": config.static_int8(),
    "smoothquant": config.smoothquant(),
    "lsq": config.lsq(),
    "fp8": config.fp8(),
    "fp8 per tensor": config.fp8(per_tensor=True),
    "fp8 delayed": config.fp8(delayed=True),
    "fp8 e3m4": config.fp8(forward="float8_e3m4"),
    "block_fp8": config.block_fp8(32),
    "mxfp8": config.mxfp8(),
    "mxfp6": config.mxfp6(),
    "mxfp4": config.mxfp4(),
    "mxint8": config.mxint8(),
    "nvfp4": config.nvfp4(),
}


@pytest.mark.code("quick")
@pytest.mark.parametrize(
    "preset", mostly_slow(PRESETS, "fully_quantized", "static_int8", "fp8", "mxfp4")
)
def test_gradients_of_every_preset_are_the_same_under_every_policy(preset):
    cfg = PRESETS[preset]
    x = normal((32, 64))
    w = normal((64, 32), 1)
    states = aqtlite.statistics.init_states(cfg, x, w, DIMS)
    states = aqtlite.statistics.update_states(cfg, states, x, w, DIMS)
    dot = aqtlite.make_dot_general(cfg)

    def layer(x, w, states):
        return dot(x, w, DIMS, states=states)

    @jax.jit
    def gradients(x, w, states):
        def of_layer(layer):
            def loss(x, w, dlhs, drhs):
                given = states._replace(dlhs=dlhs, drhs=drhs)
                return jnp.square(layer(x, w, given)).sum()

            return jax.grad(loss, (0, 1, 2, 3))(x, w, states.dlhs, states.drhs)

        found = {
            name: of_layer(jax.checkpoint(layer, policy=policy))
            for name, policy in POLICIES.items()
        }
        return of_layer(layer), found

    wanted, found = gradients(x, w, states)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted))
    # Sums of floats depend on what XLA fuses them with.
    tolerance = 1e-6 if preset in ("unquantized", "weight_only", "qat") else 0

    for name, got in found.items():
        jax.tree.map(
            functools.partial(
                np.testing.assert_allclose,
                rtol=tolerance,
                atol=100 * tolerance,
                err_msg=name,
            ),
            got,
            wanted,
        )


def test_frozen_floats_of_8_bits_are_saved_exactly():
    cfg = config.fp8()
    x, w = jnp.linspace(-1, 1, 32).reshape(2, 16), jnp.linspace(-2, 1, 64)
    frozen = aqtlite.quantize(w.reshape(16, 4), cfg.fwd.rhs, 0)
    dot = aqtlite.make_dot_general(cfg)

    def gradient(frozen, policy):
        layer = jax.checkpoint(lambda x: dot(x, frozen, DIMS), policy=policy)
        return jax.grad(lambda x: layer(x).sum())(x)

    for policy in (jax.checkpoint_policies.everything_saveable, remat.save_quantized()):
        got = jax.jit(functools.partial(gradient, policy=policy))(frozen)
        np.testing.assert_array_equal(got, gradient(frozen, None))

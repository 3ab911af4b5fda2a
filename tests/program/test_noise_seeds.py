import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral, quantize_model

NOISY = numerics.IntSymmetric(bits=4, preserve_max_val=True, stochastic_rounding=True)
# A constant range: without a key, all calls and all steps have the same noise.
CFG = config.update(
    config.fully_quantized(bwd_bits=None, use_stochastic_rounding=False),
    {"fwd.lhs.numerics": NOISY, "fwd.lhs.calibration": calibration.Constant(3.0)},
)
X = jax.random.normal(jax.random.key(0), (4, 16))


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x, nn.Dense(8, kernel_init=nn.initializers.ones)(x)


class Steps(nn.Module):
    """Equal layers of equal weights, each applied to the input."""

    shared: bool

    @nn.compact
    def __call__(self, x):
        lifted = (
            {"variable_broadcast": "params"}
            if self.shared
            else {"variable_axes": {"params": 0}}
        )
        rngs = {"params": not self.shared}
        return nn.scan(Step, **lifted, split_rngs=rngs, length=3)()(x, None)[1]


def by_rules(model, cfg=CFG):
    quantized = quantize_model(model, cfg)
    variables = quantized.init(jax.random.key(1), X)
    return lambda key: quantized.apply(variables, X, rngs={"aqt": key})


def injected(model):
    layer = model.copy(dot_general=AqtDotGeneral(CFG))
    variables = layer.init(jax.random.key(1), X)
    return lambda key: layer.apply(variables, X, rngs={"aqt": key})


@pytest.mark.parametrize("run_with", [by_rules, injected])
def test_noise_averages_out_over_keys(run_with):
    run = run_with(nn.Dense(8))
    keys = jax.random.split(jax.random.key(2), 512)
    outs = jax.jit(jax.vmap(run))(keys)
    of_float = by_rules(nn.Dense(8), config.weight_only(8))
    error = jnp.abs(outs.mean(0) - of_float(keys[0]))
    assert outs.std(0).min() > 0
    assert (error < 6 * outs.std(0) / len(keys) ** 0.5).all()
    np.testing.assert_array_equal(run(keys[0]), run(keys[0]))


def test_gradients_are_rounded_by_the_key():
    quantized = quantize_model(nn.Dense(8), config.fully_quantized())
    variables = quantized.init(jax.random.key(1), X)

    def gradient(**kwargs):
        return jax.grad(lambda v: (quantized.apply(v, X, **kwargs) ** 2).sum())(
            variables
        )["params"]["kernel"]

    first, second = (gradient(rngs={"aqt": jax.random.key(i)}) for i in range(2))
    assert not (first == second).all()
    assert not (first == gradient()).all()


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("shared", [False, True])
def test_steps_of_scans_have_noise_of_their_own(shared, make_key):
    run = by_rules(Steps(shared))
    first, second, third = run(make_key(0))
    assert not (first == second).all() and not (second == third).all()
    assert not (run(make_key(1)) == run(make_key(0))).all()

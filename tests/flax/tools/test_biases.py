"""Biases that make up for the mean errors of frozen kernels."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import Rule, config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    AqtEinsum,
    convert,
    correct_biases,
    quantize_model,
)
from tests.checkpoint.support import assert_same
from tests.common import normal
from tests.flax.support import apply, init

pytestmark = pytest.mark.code("quick")

CFG = config.weight_only(3)
X = jnp.abs(normal((16, 6, 6, 3)))  # as after a ReLU


class Cnn(nn.Module):
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(
            nn.Conv, conv_general_dilated=AqtConvGeneralDilated(self.cfg)
        )
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(conv(8, (3, 3))(x))
        x = nn.relu(conv(8, (3, 3), feature_group_count=8, use_bias=False)(x))
        x = nn.DenseGeneral((2, 4), dot_general=dot_general)(x.mean((1, 2)))
        x = nn.DenseGeneral(5, axis=(-2, -1), dot_general=dot_general)(x)
        return x + nn.Dense(5, dot_general=dot_general, name="last")(x)


VARIABLES = init(Cnn(), X)
MODELS = {"injected": Cnn(CFG), "by rules": quantize_model(Cnn(), CFG)}


@pytest.mark.parametrize("name", MODELS)
def test_mean_outputs_are_those_of_the_float_model(name):
    model = MODELS[name]
    serving = convert(model, VARIABLES, X)
    batches = [X[:8], X[8:]]
    corrected = correct_biases(model, VARIABLES, serving, batches, train=False)
    # The first layer sees no errors but its own, whose mean is gone.
    kernel = serving["aqt"]["Conv_0"]["kernel"]["rhs"].in_own_order().dequant()
    layer = nn.Conv(8, (3, 3))
    exact = layer.apply({"params": VARIABLES["params"]["Conv_0"]}, X)
    for variables, tolerance in ((corrected, 1e-6), (serving, None)):
        params = {"kernel": kernel, "bias": variables["params"]["Conv_0"]["bias"]}
        error = (layer.apply({"params": params}, X) - exact).mean((0, 1, 2))
        assert (jnp.abs(error).max() < 1e-6) == (tolerance is not None)
    wanted = apply(Cnn(), VARIABLES, X)
    errors = [
        jnp.linalg.norm((apply(model, one, X) - wanted).mean(0))
        for one in (corrected, serving)
    ]
    assert errors[0] < 0.3 * errors[1]
    # Nothing but the biases changed.
    assert jax.tree.structure(corrected) == jax.tree.structure(serving)
    assert_same(corrected["aqt"], serving["aqt"])


def test_injected_models_and_rules_agree():
    one, other = (
        correct_biases(model, VARIABLES, convert(model, VARIABLES, X), [X])["params"]
        for model in MODELS.values()
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


class Own(nn.Module):
    """A bias of another name, beside experts that have none."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        experts = self.param("experts", init, (2, 4, 4))
        x = jax.lax.ragged_dot(jnp.abs(x), experts, jnp.array([3, x.shape[0] - 3]))
        heads = self.param("heads", init, (4, 2, 3))
        shift = self.param("shift", nn.initializers.ones, (2, 3))
        return AqtEinsum(CFG)("bd,dhk->bhk", nn.relu(x), heads) + shift


@pytest.mark.parametrize("by_rules", [False, True])
def test_a_bias_of_another_name(by_rules):
    x = normal((32, 4))
    variables = init(Own(), x)
    rules = [Rule(op="ragged_dot", cfg=CFG)]
    model = quantize_model(Own(), rules) if by_rules else Own()
    serving = convert(model, variables, x)
    found = correct_biases(model, variables, serving, [x])
    assert (found["params"]["shift"] != 1).all()
    wanted = correct_biases(Own(), variables, convert(Own(), variables, x), [x])
    assert_same(found["params"]["shift"], wanted["params"]["shift"])


def test_layers_that_are_called_twice_with_states_of_their_own():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4)
            return layer(x) + layer(3 * x)

    x = jnp.abs(normal((32, 4)))
    model = quantize_model(Twice(), config.lsq_weight_only(3))
    variables = init(model, x)
    params = variables["params"]["Dense_0"]
    first, *_ = (name for name in params if name.startswith("aqt_"))
    params[first] = jax.tree.map(lambda step: 1.5 * step, params[first])
    serving = convert(model, variables, x)
    corrected = correct_biases(model, variables, serving, [x])
    exact = Twice().apply(variables, x)
    error = (apply(model, corrected, x) - exact).mean(0)
    np.testing.assert_allclose(error, 0, atol=1e-5)


def test_layers_that_are_called_twice():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, dot_general=AqtDotGeneral(CFG))
            return layer(x) + layer(3 * x)

    x = jnp.abs(normal((32, 4)))
    variables = init(Twice(), x)
    serving = convert(Twice(), variables, x)
    corrected = correct_biases(Twice(), variables, serving, [x])
    params = variables["params"]["Dense_0"]
    exact = 4 * x @ params["kernel"] + 2 * params["bias"]
    error = (apply(Twice(), corrected, x) - exact).mean(0)
    np.testing.assert_allclose(error, 0, atol=1e-5)


def test_errors():
    model, serving = MODELS["injected"], convert(MODELS["injected"], VARIABLES, X)
    with pytest.raises(ValueError, match="given no batch"):
        correct_biases(model, VARIABLES, serving, [])
    with pytest.raises(
        ValueError, match="no frozen weight whose contraction has a bias"
    ):
        correct_biases(model, VARIABLES, VARIABLES, [X])
    with pytest.raises(TypeError, match="whose rows would be taken for batches"):
        correct_biases(model, VARIABLES, serving, X)
    rotated = config.update(CFG, {"fwd.rotation": config.Hadamard()})
    dense = nn.Dense(4, dot_general=AqtDotGeneral(rotated))
    x = normal((4, 8))
    variables = init(dense, x)
    with pytest.raises(ValueError, match="is smoothed or rotated"):
        correct_biases(dense, variables, convert(dense, variables, x), [x])


@pytest.mark.slow
def test_no_layers_but_those_of_a_scan_are_refused():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4, dot_general=AqtDotGeneral(CFG))(x), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "aqt": 0}
            layers = nn.scan(
                Layer, variable_axes=axes, split_rngs={"params": True}, length=2
            )
            return layers()(x, None)[0]

    x = normal((4, 4))
    variables = init(Layers(), x)
    serving = convert(Layers(), variables, x)
    with pytest.raises(ValueError, match="biases that are outside of loops"):
        correct_biases(Layers(), variables, serving, [x])

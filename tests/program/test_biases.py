"""Biases that make up for the mean errors of frozen weights, of functions and NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.flax import convert, correct_biases, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from tests.checkpoint.support import assert_same
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

CFG = config.weight_only(3)
X = jnp.abs(normal((16, 6, 6, 3)))  # as after a ReLU


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.relu(nn.Conv(8, (3, 3), feature_group_count=8, use_bias=False)(x))
        x = nn.DenseGeneral((2, 4))(x.mean((1, 2)))
        return nn.DenseGeneral(5, axis=(-2, -1))(x)


class NnxCnn(nnx.Module):
    def __init__(self, params=None):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(
            8, 8, (3, 3), feature_group_count=8, use_bias=False, rngs=rngs
        )
        self.split = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.join = nnx.LinearGeneral((2, 4), 5, axis=(-2, -1), rngs=rngs)
        if params is not None:
            layers = self.conv, self.middle, self.split, self.join
            names = "Conv_0", "Conv_1", "DenseGeneral_0", "DenseGeneral_1"
            for layer, name in zip(layers, names, strict=True):
                layer.kernel.set_value(params[name]["kernel"])
                if "bias" in params[name]:
                    layer.bias.set_value(params[name]["bias"])

    def __call__(self, x):
        x = nnx.relu(self.middle(nnx.relu(self.conv(x))))
        return self.join(self.split(x.mean((1, 2))))


VARIABLES = init(Cnn(), X)
NAMES = "Conv_0", "DenseGeneral_0", "DenseGeneral_1"
BATCHES = [X[:8], X[8:]]


@pytest.fixture(scope="module")
def of_linen():
    """The biases that `aqtlite.flax.correct_biases` finds."""
    model = quantize_model(Cnn(), CFG)
    serving = convert(model, VARIABLES, X)
    found = correct_biases(model, VARIABLES, serving, BATCHES)["params"]
    return [found[name]["bias"] for name in NAMES]


def test_functions(of_linen):
    fn_q = aqtlite.quantize_function(Cnn().apply, CFG, params=0)
    serve, serving = aqtlite.convert_function(fn_q, VARIABLES, X)
    corrected = aqtlite.correct_biases(serve, VARIABLES, serving, BATCHES)
    found = [corrected["params"]["params"][name]["bias"] for name in NAMES]
    for one, other in zip(found, of_linen, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    # Nothing but the biases changed.
    assert jax.tree.structure(corrected) == jax.tree.structure(serving)
    assert_same(corrected["aqt"], serving["aqt"])
    wanted = jax.jit(Cnn().apply)(VARIABLES, X)
    errors = [
        jnp.linalg.norm((jax.jit(serve)(one, X) - wanted).mean(0))
        for one in (corrected, serving)
    ]
    assert errors[0] < 0.3 * errors[1]


def test_nnx_models(of_linen):
    model = aqtlite_nnx.quantize_model(NnxCnn(VARIABLES["params"]), CFG)
    serving = aqtlite_nnx.convert(model, X)
    corrected = aqtlite_nnx.correct_biases(model, serving, BATCHES)
    layers = corrected.conv, corrected.split, corrected.join
    for layer, other in zip(layers, of_linen, strict=True):
        np.testing.assert_allclose(layer.bias.get_value(), other, atol=1e-6)
    # The model that was given is as before.
    assert (serving.conv.bias.get_value() == model.conv.bias.get_value()).all()
    call = nnx.jit(lambda m, x: m(x))
    assert (call(corrected, X) != call(serving, X)).any()


def test_weights_of_other_layouts():
    """As in Equinox: weights come first, one example after the other."""

    def apply(params, x):
        def one(x):
            x = jnp.einsum("oi,i->o", params["w"], x) + params["b"]
            return jax.checkpoint(lambda x: params["v"] @ x + params["c"])(x)

        return jax.vmap(one)(x)

    x = jnp.abs(normal((32, 8)))
    shapes = {"w": (6, 8), "b": (6,), "v": (4, 6), "c": (4,)}
    params = {name: normal(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    fn_q = aqtlite.quantize_function(apply, CFG, params=0)
    serve, serving = aqtlite.convert_function(fn_q, params, x)
    corrected = aqtlite.correct_biases(serve, params, serving, [x])
    np.testing.assert_allclose(
        serve(corrected, x).mean(0), apply(params, x).mean(0), atol=1e-5
    )


def test_a_layer_that_is_called_twice():
    def apply(params, x):
        def layer(x):
            return x @ params["w"] + params["b"]

        return layer(x) + layer(3 * x)

    x, params = jnp.abs(normal((32, 4))), {"w": normal((4, 4)), "b": normal((4,), 1)}
    fn_q = aqtlite.quantize_function(apply, CFG, params=0)
    serve, serving = aqtlite.convert_function(fn_q, params, x)
    corrected = aqtlite.correct_biases(serve, params, serving, [x])
    error = (serve(corrected, x) - apply(params, x)).mean(0)
    np.testing.assert_allclose(error, 0, atol=1e-5)


def _corrected_in_batches(kind, x):
    """Mean error of a layer whose bias is corrected by batches of 30 and 2 rows."""
    batches = [x[:30], x[30:]]
    if kind == "function":
        params = {"w": normal((4, 6)), "b": normal((6,), 1)}
        fn_q = aqtlite.quantize_function(_layer, CFG, params=0)
        serve, serving = aqtlite.convert_function(fn_q, params, x)
        serving = aqtlite.correct_biases(serve, params, serving, batches)
        return serve(serving, x) - _layer(params, x)
    if kind == "linen":
        model, variables = quantize_model(nn.Dense(6), CFG), init(nn.Dense(6), x)
        serving = convert(model, variables, x)
        serving = correct_biases(model, variables, serving, batches)
        return model.apply(serving, x) - nn.Dense(6).apply(variables, x)
    layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    model = aqtlite_nnx.quantize_model(layer, CFG)
    serving = aqtlite_nnx.convert(model, x)
    serving = aqtlite_nnx.correct_biases(model, serving, batches)
    return serving(x) - layer(x)


each_kind = pytest.mark.parametrize("kind", ["function", "linen", "nnx"])


@each_kind
def test_elements_of_a_small_batch_count_alike(kind):
    x = normal((32, 4)).at[30:].add(20)
    error = _corrected_in_batches(kind, x).mean(0)
    np.testing.assert_allclose(error, 0, atol=1e-5)


@each_kind
def test_a_batch_with_nan_is_left_out(kind):
    x = normal((32, 4))
    with pytest.warns(UserWarning, match="left out batch 1"):
        errors = _corrected_in_batches(kind, x.at[31, 2].set(jnp.nan))
    np.testing.assert_allclose(errors[:30].mean(0), 0, atol=1e-5)
    with pytest.raises(ValueError, match="no batch of finite values"):
        _corrected_in_batches(kind, x.at[:, 2].set(jnp.nan))


def _layer(params, x):
    return x @ params["w"] + params["b"]


def test_errors():
    x, params = normal((8, 8)), {"w": normal((8, 4)), "b": normal((4,))}
    fn_q = aqtlite.quantize_function(_layer, CFG, params=0)
    serve, serving = aqtlite.convert_function(fn_q, params, x)
    with pytest.raises(ValueError, match="given no batch"):
        aqtlite.correct_biases(serve, params, serving, [])
    with pytest.raises(TypeError, match="whose rows would be taken for batches"):
        aqtlite.correct_biases(serve, params, serving, x)
    with pytest.raises(TypeError, match="that aqtlite.convert_function returned"):
        aqtlite.correct_biases(fn_q, params, serving, [x])
    rotated = config.update(CFG, {"fwd.rotation": config.Hadamard()})
    other = aqtlite.quantize_function(_layer, rotated, params=0)
    with pytest.raises(ValueError, match="'w' is smoothed or rotated"):
        aqtlite.correct_biases(*_converted(other, params, x), [x])
    plain = aqtlite.quantize_function(lambda p, x: x @ p["w"], CFG, params=0)
    with pytest.raises(ValueError, match="no frozen weight whose contraction has a"):
        aqtlite.correct_biases(*_converted(plain, {"w": params["w"]}, x), [x])
    both = aqtlite.quantize_function(lambda p, x: _layer(p, x) * p["b"], CFG, params=0)
    with pytest.raises(ValueError, match="no frozen weight whose contraction has a"):
        aqtlite.correct_biases(*_converted(both, params, x), [x])
    model = NnxCnn()
    with pytest.raises(TypeError, match="correct_biases takes what"):
        aqtlite_nnx.correct_biases(model, model, [X])


def _converted(fn_q, params, x):
    serve, serving = aqtlite.convert_function(fn_q, params, x)
    return serve, params, serving

"""The check that users run on their own models: served as trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.testing import assert_served_equals_trained
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((3, 8))
INT8 = AqtDotGeneral(config.fully_quantized())


class Model(nn.Module):
    """Methods, several outputs, a cache and a flag."""

    def setup(self):
        self.first = nn.Dense(8, dot_general=INT8)
        self.second = nn.Dense(5, dot_general=INT8)
        self.last = self.variable("cache", "last", jnp.zeros, (3, 8))

    def __call__(self, x, *, scale=1.0):
        hidden = self.first(x) * scale
        return {"hidden": hidden, "out": self.second(nn.relu(hidden))}

    def encode(self, x):
        return self.first(x), jnp.argmax(self.first(x), -1)

    def with_cache(self, x):
        self.last.value = self.first(x)
        return self.last.value

    def with_noise(self, x):
        return self.first(x) + jax.random.normal(self.make_rng("noise"), x.shape)


MODEL = Model()


@pytest.fixture(scope="module")
def variables():
    return init(MODEL, X)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X,), {"scale": 0.5}),
        ((np.asarray(X),), {"scale": jnp.float32(0.5)}),
        ((X,), {"method": "encode"}),
        ((X,), {"method": Model.with_cache, "mutable": ["cache"]}),
        ((X,), {"method": "with_noise", "rngs": {"noise": jax.random.key(1)}}),
    ],
)
def test_a_converted_model_passes(variables, args, kwargs):
    assert_served_equals_trained(MODEL, variables, *args, **kwargs)


def test_several_calls_of_one_conversion(variables):
    serving = convert(MODEL, variables, X)
    for x in (X, X[:1], -2 * X):
        assert_served_equals_trained(MODEL, variables, x, serving=serving)
    assert_served_equals_trained(MODEL, variables, X, serving=serving, method="encode")


def with_scale(serving, change):
    """Serving variables in which the scale of the second layer's kernel is changed."""
    weight = dict(serving["aqt"]["second"]["kernel"])
    weight["rhs"] = dataclasses.replace(
        weight["rhs"], scale=change(weight["rhs"].scale)
    )
    second = {**serving["aqt"]["second"], "kernel": weight}
    return {**serving, "aqt": {**serving["aqt"], "second": second}}


def test_the_first_difference_is_described(variables):
    one_channel = jnp.ones(5).at[2].set(2.0)
    serving = convert(MODEL, variables, X)
    changed = with_scale(serving, lambda s: s * one_channel.reshape(s.shape))
    trained = jax.jit(MODEL.apply)(variables, X)["out"]
    served = jax.jit(MODEL.apply)(changed, X)["out"]
    largest = float(jnp.max(jnp.abs(trained - served)))
    with pytest.raises(AssertionError) as raised:
        assert_served_equals_trained(MODEL, variables, X, serving=changed)
    message = str(raised.value)
    assert "the served Model differs from the trained one in its output['out']" in (
        message
    )
    assert "float32 of shape (3, 5): 3 of 15 elements differ" in message
    assert f"by up to {largest:.3g} (relative 1)" in message
    assert "the first at (0, 2)" in message
    assert "docs/serving.md" in message


def test_what_is_rounded_at_conversion_is_said_to_differ():
    model = quantize_model(nn.Dense(8), config.gptq(4))
    variables = init(model, X)
    _, gathered = model.apply(variables, X, mutable=["aqt_stats"])
    with pytest.raises(
        AssertionError, match="The rounding of kernel is chosen at conv"
    ):
        assert_served_equals_trained(model, {**variables, **gathered}, X)


def test_nan_equals_nan_and_nothing_else(variables):
    serving = convert(MODEL, variables, X)
    poisoned = with_scale(serving, lambda s: s * jnp.nan)
    with pytest.raises(AssertionError, match="15 of 15 elements differ"):
        assert_served_equals_trained(MODEL, variables, X, serving=poisoned)
    assert_served_equals_trained(
        MODEL, variables, X.at[0].set(jnp.nan), serving=serving
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(jnp.float16), "float32 of shape .* served as float16"),
        (lambda x: x[:1], r"of shape \(3, 8\): it is served as .* \(1, 8\)"),
        (lambda x: (x, x), "the trained Other returns .*, the served one"),
        (lambda x: -x, "24 of 24 elements differ"),
    ],
)
def test_dtype_shape_and_structure_are_compared(change, message):
    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8, dot_general=INT8)(x)
            return change(y) if self.has_variable("flags", "is_served") else y

    model = Other()
    variables = init(model, X)
    serving = {**convert(model, variables, X), "flags": {"is_served": jnp.ones(())}}
    with pytest.raises(AssertionError, match=message):
        assert_served_equals_trained(model, variables, X, serving=serving)


def test_a_zero_has_a_sign():
    class Zero(nn.Module):
        @nn.compact
        def __call__(self, x):
            zeros = 0 * nn.Dense(8, dot_general=INT8)(jnp.abs(x)) ** 2
            return -zeros if self.has_variable("flags", "is_served") else zeros

    model = Zero()
    variables = init(model, X)
    serving = {**convert(model, variables, X), "flags": {"is_served": jnp.ones(())}}
    with pytest.raises(AssertionError, match="by up to 0 "):
        assert_served_equals_trained(model, variables, X, serving=serving)


def test_serving_variables_without_frozen_weights(variables):
    with pytest.raises(ValueError, match="hold no frozen weights"):
        assert_served_equals_trained(MODEL, variables, X, serving=variables)


@pytest.mark.parametrize("cfg", [None, config.unquantized()])
def test_a_float_model_is_said_to_be_one(cfg):
    model = nn.Dense(5, dot_general=AqtDotGeneral(cfg))
    variables = init(model, X)
    with pytest.raises(ValueError, match=r"all 1 contractions .* is a float model"):
        assert_served_equals_trained(model, variables, X)

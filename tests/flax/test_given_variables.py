"""What is forgotten in a call: parameters' collection, a sample, a state."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite.flax.nnx
from aqtlite import config, convert_function, quantize_function
from aqtlite.flax import AqtDotGeneral, Call, calibrate, convert, quantize_model
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X, STATIC, INT8 = normal((3, 8)), config.static_int8(), config.fully_quantized()


class Model(nn.Module):
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x, *, scale=1):
        return scale * nn.Dense(4, dot_general=AqtDotGeneral(self.cfg))(x)

    def encode(self, x, y):
        return self(x) + y


# --- The level of the collections ----------------------------------------------------


def calls_without_the_level():
    rules, injected = quantize_model(Model(), STATIC), Model(STATIC)
    return {
        "apply": lambda params: rules.apply(params, X),
        "plan": lambda params: rules.plan(params, X),
        "calibrate": lambda params: calibrate(injected, params, [X]),
        "calibrate by rules": lambda params: calibrate(rules, params, [X]),
        "convert": lambda params: convert(injected, params, X),
    }


@pytest.mark.parametrize("name", calls_without_the_level())
@pytest.mark.parametrize("is_nested", [True, False], ids=["model", "layer"])
def test_parameters_without_their_collection(name, is_nested):
    params = init(Model(), X)["params"]
    given = params if is_nested else params["Dense_0"]
    with pytest.raises(ValueError, match="collection 'params'"):
        calls_without_the_level()[name](given)


def test_parameters_without_their_collection_say_what_to_give():
    params = init(Model(), X)["params"]
    words = r"no collection 'params', but 'Dense_0'.*give {'params': parameters}"
    with pytest.raises(ValueError, match=words):
        quantize_model(Model(), INT8).apply(params, X)


def test_another_error_of_flax_is_left_as_it_is():
    class Bias(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) + self.variable("bias", "b").value

    model = quantize_model(Bias(), INT8)
    params = {"Dense_0": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}}
    with pytest.raises(Exception, match='collection "bias"'):
        model.apply({"params": params}, X)


@pytest.mark.parametrize("method", ["apply", "plan"])
def test_arguments_without_variables(method):
    with pytest.raises(TypeError, match="come before its arguments; got"):
        getattr(quantize_model(Model(), INT8), method)(X)


def test_a_model_without_parameters():
    class Product(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ x.T

    assert quantize_model(Product(), INT8).apply({}, X).shape == (3, 3)


# --- A sample ------------------------------------------------------------------------


def convert_linen(*args, **kwargs):
    variables = init(Model(), X)
    return convert(Model(INT8), variables, *args, **kwargs)


def convert_by_rules(*args, **kwargs):
    variables = init(Model(), X)
    return convert(quantize_model(Model(), INT8), variables, *args, **kwargs)


def convert_nnx(*args, **kwargs):
    class OfNnx(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, *, scale=1):
            return scale * self.layer(x)

        def encode(self, x, y):
            return self(x) + y

    model = aqtlite.flax.nnx.quantize_model(OfNnx(), INT8)
    return aqtlite.flax.nnx.convert(model, *args, **kwargs)


def convert_a_function(*args, **kwargs):
    function = quantize_function(
        lambda w, x, *, scale=1: scale * (x @ w), INT8, params=0
    )
    return convert_function(function, jnp.ones((8, 4)), *args, **kwargs)


every_conversion = pytest.mark.parametrize(
    "run", [convert_linen, convert_by_rules, convert_nnx, convert_a_function]
)


@every_conversion
@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((X, X, X), {}, "too many positional arguments"),
        ((X,), {"size": 1}, "got an unexpected keyword argument 'size'"),
    ],
    ids=["none", "too many", "unknown"],
)
def test_a_conversion_with_other_arguments_than_the_model_takes(
    run, args, kwargs, words
):
    with pytest.raises(TypeError, match=rf"^convert.* traces .*\(.*{words}"):
        run(*args, **kwargs)


@every_conversion
def test_keyword_arguments_of_a_conversion(run):
    assert run(X, scale=2) is not None


@pytest.mark.parametrize("run", [convert_linen, convert_by_rules, convert_nnx])
def test_each_call_of_a_conversion_is_checked(run):
    calls = [Call(X), Call(X, method="encode")]
    with pytest.raises(TypeError, match="encode cannot be called so: missing .*'y'"):
        run(calls=calls)
    assert run(calls=[calls[0], Call(X, 1.0, method="encode")]) is not None


# --- A state -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"params": jnp.ones((8, 4))},
        {"params": {"kernel": jnp.ones((8, 4))}},
        {"params": {"Dense_0": {"kernel": jnp.ones((8, 4))}}},
    ],
    ids=["array", "layer", "model"],
)
def test_variables_are_no_state(variables):
    def function(variables, x):
        (w,) = jax.tree.leaves(variables)
        return x @ w

    quantized = quantize_function(function, STATIC, params=0)
    with pytest.raises(TypeError, match=r"call the quantized function as f\(state, \*"):
        quantized(variables, X)
    state = quantized.init_state(variables, X)
    out, _ = quantized(state, variables, X)
    assert out.shape == (3, 4)

"""A batch of no rows, on quantized and on converted models."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import aqtlite
from aqtlite import config, quantize_function
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.common import assert_same, mostly_slow, nearest, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((4, 64))
CONFIGS = {
    "int8": nearest(),
    "weights": config.weight_only(4),
    "mxfp8": config.mxfp8(),
    "static": config.static_int8(),
}


class Model(nn.Module):
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dot_general=AqtDotGeneral(self.cfg))(x)


@pytest.mark.parametrize("by", ["injection", "rules"])
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "static"))
def test_linen(name, by):
    cfg = CONFIGS[name]
    model = Model(cfg) if by == "injection" else quantize_model(Model(), cfg)
    variables = init(model, X)
    if "aqt_stats" in variables:
        _, after = model.apply(variables, X, mutable=["aqt_stats"])
        variables = {**variables, **after}
        _, same = model.apply(variables, X[:0], mutable=["aqt_stats"])
        assert_same(same, after)
    serving = convert(model, variables, X)
    assert jax.jit(model.apply)(serving, X[:0]).shape == (0, 8)


def test_nnx():
    model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    model = aqt_nnx.quantize_model(model, nearest())
    assert model(X[:0]).shape == (0, 8)
    assert aqt_nnx.convert(model, X)(X[:0]).shape == (0, 8)


def conv(w, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def experts(w, x):
    return lax.ragged_dot(x, w, jnp.full(2, x.shape[0] // 2, jnp.int32))


@pytest.mark.parametrize(
    ("function", "w", "x"),
    [
        (lambda w, x: x @ w, (16, 8), (4, 16)),
        (lambda w, x: w @ x.T, (8, 16), (4, 16)),
        (conv, (3, 3, 4, 5), (2, 6, 6, 4)),
        (experts, (2, 16, 8), (4, 16)),
    ],
    ids=["matmul", "weight first", "conv", "ragged_dot"],
)
def test_functions(function, w, x):
    w, x = normal(w), normal(x)
    quantized = quantize_function(function, nearest(), params=0)
    serve, serving = aqtlite.convert_function(quantized, w, x)
    shape = jax.eval_shape(function, w, x[:0]).shape
    assert quantized(w, x[:0]).shape == serve(serving, x[:0]).shape == shape
    (one,) = quantized.plan(w, x[:0]).contractions
    assert one.is_quantized


def test_an_empty_weight_stays_in_float():
    quantized = quantize_function(lambda w, x: x @ w, nearest(), params=0)
    (one,) = quantized.plan(jnp.ones((64, 0)), X).contractions
    assert one.why_float == "an operand is empty"
    assert quantized(jnp.ones((64, 0)), X).shape == (4, 0)

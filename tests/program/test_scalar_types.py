"""Types of numbers among the arguments: they have a dtype, and are no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, calibrate, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from tests.common import nearest, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((2, 8))
TYPES = {"jnp": jnp.bfloat16, "np": np.float16}
every_type = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)


class Model(nn.Module):
    dot_general: object = None

    @nn.compact
    def __call__(self, x, dtype=None):
        return nn.Dense(4, dot_general=self.dot_general)(x).astype(dtype or x.dtype)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, dtype):
        return self.layer(x).astype(dtype)

    def init_cache(self, rows, dtype):
        return jnp.zeros((rows, 4), dtype)


def _linen(build):
    def make(cfg, dtype):
        model = build(cfg)
        variables = init(model, X)
        serving = convert(model, variables, X, dtype)
        return [lambda v=v: model.apply(v, X, dtype) for v in (variables, serving)]

    return make


def _nnx(cfg, dtype):
    model = aqtlite_nnx.quantize_model(NnxModel(nnx.Rngs(0)), cfg)
    serving = aqtlite_nnx.convert(model, X, dtype)
    return [lambda m=m: m(X, dtype=dtype) for m in (model, serving)]


def _function(cfg, dtype):
    def function(w, x, dtype):
        return (x @ w).astype(dtype)

    quantized, w = aqtlite.quantize_function(function, cfg, params=0), normal((8, 4))
    serve, serving = aqtlite.convert_function(quantized, w, X, dtype)
    return [lambda: quantized(w, X, dtype), lambda: serve(serving, X, dtype=dtype)]


WAYS = {
    "injected": _linen(lambda cfg: Model(AqtDotGeneral(cfg))),
    "rules": _linen(lambda cfg: quantize_model(Model(), cfg)),
    "nnx": _nnx,
    "function": _function,
}


@every_type
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_calls_and_conversions_take_them(way, dtype):
    trained, served = (call() for call in way(nearest(), dtype))
    assert trained.dtype == served.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(trained, served)


@every_type
def test_methods_of_nnx_without_contractions_take_them(dtype):
    model = aqtlite_nnx.quantize_model(NnxModel(nnx.Rngs(0)), nearest())
    for run in (
        lambda m: m.init_cache(2, dtype),
        lambda m: m.init_cache(2, dtype=dtype),
    ):
        for made in (run(model), nnx.jit(run)(model)):
            assert made.shape == (2, 4) and made.dtype == jnp.dtype(dtype)


@every_type
def test_what_gathers_statistics_takes_them(dtype):
    model = quantize_model(Model(), config.static_int8("max"))
    variables = calibrate(model, init(model, X), [X], dtype=dtype)
    quantized = aqtlite.quantize_function(
        lambda w, x, dtype: (x @ w).astype(dtype), config.static_int8("max"), params=0
    )
    w = normal((8, 4))
    state, masks = quantized.init_state(w, X, dtype), (None, jnp.array([True, False]))
    counted = quantized.gather_counted((*masks, None), state, w, X, dtype)
    state = quantized.gather(state, w, X, dtype)
    for found in (variables["aqt_stats"]["Dense_0"], state["aqt_stats"]):
        [entry] = found.values()
        assert entry["lhs"].batches == 1
    [entry] = counted["aqt_stats"].values()
    assert entry["lhs"].state["ends"]["high"] == jnp.abs(X[0]).max()


def test_a_plan_takes_them():
    model = quantize_model(Model(), nearest())
    shapes = jax.eval_shape(lambda: init(model, X))
    assert len(model.plan(shapes, X, jnp.bfloat16).quantized()) == 1

"""Marks of modules, and the paths that rules match by them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax import convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.jaxpr import module_scopes
from tests.common import normal

pytestmark = pytest.mark.code("quick")

X = normal((3, 8))


@pytest.mark.parametrize(
    ("scope", "path", "module"),
    [
        ("", "", ""),
        ("a/b/ab,bc->ac", "a/b/ab,bc->ac", "a/b"),
        ("M/flax=%40M/up/flax=up", "M/up", "up"),
        ("M.f/flax=%40M/up/flax=up/s", "M/up/s", "up"),
        ("outer/M/flax=%40M/s/up.f/flax=up", "outer/M/up", "up"),
        ("M/flax=%40M/a/flax=a/a.f/flax=/b/flax=b", "M/a/b", "a/b"),
        ("M/flax=%40M/a/flax=a/b.f/flax=%2Fb", "M/b", "b"),
        (
            "flax=%40/s/flax=layers%2F0/ff/ab,bc->ac",
            "layers/0/ff/ab,bc->ac",
            "layers/0",
        ),
        ("M/flax=%40M/a/flax=a/s/a.f/flax=/t", "M/a/s/t", "a"),
        ("M/flax=%40M/a/flax=a/N/flax=%40N/d/flax=d", "M/a/N/d", "d"),
    ],
)
def test_resolved(scope, path, module):
    found = module_scopes.resolved(scope)
    assert (found.path, found.module) == (path, module)
    assert "flax=" not in found.written


class Embed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("table", nn.initializers.normal(), (8, 8))

    def attend(self, x):
        return x @ self.variables["params"]["table"].T


class Decoder(nn.Module):
    embed: Embed

    def setup(self):
        self.up = nn.Dense(8)

    def _scores(self, x):
        return jnp.einsum("ab,cb->ac", x, x) @ x

    def hidden(self, x):
        with jax.named_scope("hidden"):
            return self._scores(self.up(x))

    def __call__(self, x):
        return self.embed.attend(self.hidden(x))


class Model(nn.Module):
    def setup(self):
        self.embed = Embed()
        self.decoder = nn.remat(Decoder)(self.embed)

    def encode(self, x):
        return self(x)

    def __call__(self, x):
        with jax.named_scope("outer"):
            return self.decoder(self.embed(x))


PATHS = {
    "embed": "embed",
    "decoder/up": "decoder/up",
    "decoder/hidden/ab,cb->ac": "decoder",
    "decoder/hidden": "decoder",
    "embed#1": "embed",
}


@pytest.mark.parametrize("method", ["__call__", "encode"])
def test_of_linen_they_are_paths_of_modules(method):
    variables = jax.eval_shape(Model().init, jax.random.key(0), X)
    model = quantize_model(Model(), config.fully_quantized())
    found = model.plan(variables, X, method=method).contractions
    wanted = {f"Model/{path}": module for path, module in PATHS.items()}
    assert {one.path: one.module for one in found} == wanted

    def apply(variables, x):
        return Model().apply(variables, x, method=method)

    # Traced in float before, under jax.jit, where nothing is marked.
    step = jax.jit(apply)
    jax.eval_shape(step, variables, X)
    found = aqtlite.plan(step, variables, X, rules=(), params=0).contractions
    assert {one.path: one.module for one in found} == wanted


def test_what_is_stored_has_the_names_that_it_always_had():
    """Of weights in the collection of a function, and of the states beside them."""
    variables = jax.jit(Model().init)(jax.random.key(0), X)
    cfg = config.static_int8()
    rules = [Rule(module="decoder/up", cfg=cfg), Rule(module="embed", cfg=cfg)]
    function = aqtlite.quantize_function(Model().apply, rules, params=0)
    state = function.init_state(variables, X)
    up = "Model/outer/decoder/decoder.hidden/hidden/up"
    names = {up, "Model/outer/embed", "Model/outer/decoder/embed.attend"}
    assert set(state["aqt_stats"]) == names
    _, state = function(state, variables, X)
    serve, serving = aqtlite.convert_function(function, variables, X, state=state)
    assert up in serving["aqt"]
    wanted, _ = function(state, variables, X)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(serve(serving, X), wanted, rtol=1e-4)


def test_models_are_converted_by_the_paths_that_they_are_trained_by():
    variables = jax.jit(Model().init)(jax.random.key(0), X)
    cfg = config.weight_only(8)
    rules = [Rule(path="Model/decoder/up", cfg=cfg), Rule(module="embed", cfg=cfg)]
    model = quantize_model(Model(), rules)
    serving = convert(model, variables, X)
    assert set(serving["aqt"]) == {"decoder", "embed"}
    assert "up" in serving["aqt"]["decoder"]
    out, served = (jax.jit(model.apply)(one, X) for one in (variables, serving))
    np.testing.assert_allclose(served, out, rtol=1e-4)


def combine(outputs, weights):
    return jnp.einsum("bte,btk->bek", outputs, weights)


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    @jax.named_scope("experts")
    def __call__(self, x):
        return combine(x @ self.w[...], x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(8, 8, rngs=rngs)
        self.mlp = Experts(rngs)

    def block(self, x):
        return self.mlp(self.query(x))

    def __call__(self, x):
        return nnx.remat(self.block.__func__)(self, x)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs), Layer(rngs)])

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{number}"):
                x = layer(x)
        return x


def test_of_nnx_activations_are_of_the_module_that_contracts():
    x = normal((2, 8, 8))
    model = aqt_nnx.quantize_model(
        Layers(nnx.Rngs(0)),
        [Rule(module="layers/0/mlp", cfg=config.static_int8())],
    )
    found = aqt_nnx.plan(model, x).contractions
    assert [(one.path, one.module) for one in found] == [
        (path, path.partition("/experts")[0])
        for i in range(2)
        for path in (
            f"layers/{i}/query",
            f"layers/{i}/mlp/experts",
            f"layers/{i}/mlp/experts/bte,btk->bek",
        )
    ]
    assert [one.is_quantized for one in found] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    aqt_nnx.calibrate(model, [x])
    # As before there were marks.
    assert set(model.aqt.statistics) == {
        "layers/0/mlp/layer_0/experts",
        "layers/layer_0/experts/bte,btk->bek",
    }
    out = nnx.jit(lambda model, x: model(x))(model, x)
    assert isinstance(model.layers[0], Layer)
    assert "_path_in_model" not in vars(model.layers[0])
    serving = aqt_nnx.convert(model, x)
    served = nnx.jit(lambda model, x: model(x))(serving, x)
    np.testing.assert_allclose(served, out, rtol=1e-4)


class Block(nn.Module):
    """A layer of NNX in a model of Linen, as MaxText has them."""

    @nn.compact
    def __call__(self, x, _):
        return nnx.bridge.to_linen(Layer, name="layer")(x), None


class Bridged(nn.Module):
    """Its own `apply` calls Linen's."""

    def apply(self, variables, *args, **kwargs):
        return nn.Module.apply(self, variables, *args, **kwargs)

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = scanned(name="layers")(x, None)
        return nn.Dense(8, name="head")(x)


def test_of_nnx_in_linen_they_go_on_in_the_nnx_module():
    x = normal((2, 8, 8))
    variables = jax.jit(Bridged().init)(jax.random.key(0), x)
    rules = [
        Rule(module="layers/layer/query", cfg=config.weight_only(8)),
        Rule(path="Bridged/.*/mlp/experts", cfg=config.weight_only(4)),
    ]
    model = quantize_model(Bridged(), rules)
    found = model.plan(variables, x).contractions
    assert [(one.path, one.module, one.rule) for one in found] == [
        ("Bridged/layers/layer/query", "layers/layer/query", 0),
        ("Bridged/layers/layer/mlp/experts", "layers/layer/mlp", 1),
        ("Bridged/layers/layer/mlp/experts/bte,btk->bek", "layers/layer/mlp", None),
        ("Bridged/head", "head", None),
    ]
    serving = convert(model, variables, x)
    out, served = (jax.jit(model.apply)(one, x) for one in (variables, serving))
    np.testing.assert_array_equal(served, out)


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.relu(nn.Dense(16, name="up")(x)))


class Bridging(nnx.Module):
    def __init__(self, x, rngs):
        self.mlp = nnx.bridge.lazy_init(nnx.bridge.ToNNX(OfLinen(), rngs=rngs), x)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.mlp(x))


def test_of_linen_in_nnx_they_go_on_in_the_module_of_linen():
    x = normal((2, 8))
    for model, paths in (
        (Bridging(x, nnx.Rngs(0)), ["mlp/up", "mlp/down", "head"]),
        (Bridging(x, nnx.Rngs(0)).mlp, ["up", "down"]),
    ):
        quantized = aqtlite.flax.nnx.quantize_model(model, config.fully_quantized())
        found = aqtlite.flax.nnx.plan(quantized, x).contractions
        assert [one.path for one in found if one.is_quantized] == paths
        run = nnx.jit(lambda model, x: model(x))
        served = aqtlite.flax.nnx.convert(quantized, x)
        np.testing.assert_array_equal(run(served, x), run(quantized, x))

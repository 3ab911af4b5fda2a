"""Layers of quantized models, and quantized models among the layers of others."""

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax.nnx import (
    AqtDotGeneral,
    calibrate,
    convert,
    convert_in_place,
    init_state,
    layers,
    plan,
    quantize_model,
)
from tests.common import mostly_slow, nearest
from tests.flax.nnx.models import CFG, TOKENS, Mlp, Transformer, X, call

pytestmark = pytest.mark.code("quick")

H = jnp.ones((2, 4, 8))


class Private(Mlp):
    """Layers behind a method that is not public, and in containers."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.more = nnx.List([nnx.Dict(one=nnx.Linear(8, 8, rngs=rngs))])
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.down(self._features(x)), self.more[0]["one"](x)

    def _features(self, x):
        return nnx.relu(self.up(x))


@pytest.fixture(scope="module")
def model():
    return quantize_model(Private(nnx.Rngs(0)), CFG, strict=True)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


class TestLayers:
    def test_are_quantized_as_within_the_model(self, model):
        wanted = call(model, X)
        assert (wanted[0] != call(Private(nnx.Rngs(0)), X)[0]).any()

        def run(m):
            return m.down(m._features(X)), m.more[0]["one"](X)

        assert_same(nnx.jit(run)(model), wanted)
        assert_same(jax.jit(run)(model), wanted)
        for got, one in zip(run(model), wanted, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-6)

    def test_have_the_gradients_of_the_model(self):
        model = quantize_model(Mlp(nnx.Rngs(0)), nearest())

        def loss(run):
            return nnx.jit(nnx.grad(lambda m: (run(m) ** 2).sum()))(model)

        assert_same(loss(lambda m: m.down(nnx.relu(m.up(X)))), loss(lambda m: m(X)))

    def test_rules_decide(self):
        rules = [Rule(path="down", cfg=None), Rule(path="up", cfg=CFG)]
        floats = Mlp(nnx.Rngs(0))
        model = quantize_model(floats, rules)
        np.testing.assert_array_equal(model.down(model.up(X)), floats.down(model.up(X)))
        assert (model.up(X) != floats.up(X)).any()

    def test_strict_counts(self):
        model = quantize_model(Mlp(nnx.Rngs(0)), Rule(path="up", cfg=CFG), strict=True)
        assert model.up(X).shape == (4, 16)
        with pytest.raises(ValueError, match=r"(?s)strict=True.* down: no rule names"):
            model.down(model.up(X))

    def test_states_are_those_of_the_model(self):
        model = quantize_model(Mlp(nnx.Rngs(0)), config.static_int8("max"))
        with pytest.raises(ValueError, match="nothing for the contraction 'up'"):
            model.up(X)
        calibrate(model, [X])
        before = model.up(X)
        assert (model.up(5 * X) != 5 * before).any()  # Clipped.
        model.train()
        model.up(5 * X)
        ends = model.aqt.statistics["up"]["lhs"].state["ends"]
        assert ends["high"][...] == 5 * jnp.abs(X).max()

    def test_attention(self):
        model = quantize_model(Transformer(nnx.Rngs(0), 1), CFG)
        found = [one.path for one in plan(model, TOKENS).quantized()]
        assert len(found) == 8
        floats = Transformer(nnx.Rngs(0), 1).blocks[0].attention(H)
        assert (model.blocks[0].attention(H) != floats).any()

    def test_that_contract_nothing_run_as_they_are(self, model):
        other, floats = nnx.clone(model), Private(nnx.Rngs(0))
        for one in (other, floats):
            one.train()
        assert_same(other.norm(X), floats.norm(X))
        assert_same(other.norm.mean[...], floats.norm.mean[...])

    def test_of_serving_models_are_served(self, model):
        serving = convert(model, X)
        assert_same(call(serving, X), call(model, X))
        np.testing.assert_array_equal(serving.up(X), model.up(X))
        one = nnx.jit(lambda m: m.more[0]["one"](X))
        np.testing.assert_array_equal(one(serving), one(model))

    def test_without_their_model_are_refused(self, model):
        words = "a Linear of a quantized model was called without the model"
        with pytest.raises(TypeError, match=words):
            nnx.jit(lambda layer: layer(X))(model.up)
        copies = [nnx.clone(model.up), copy.deepcopy(model.up)]
        for layer in (*copies, pickle.loads(pickle.dumps(model.up))):
            with pytest.raises(TypeError, match=words):
                layer(X)
        with pytest.raises(TypeError, match="got a Linear of a quantized model"):
            convert(model.up, X)

    def test_of_a_model_that_is_gone(self):
        model = quantize_model(Mlp(nnx.Rngs(0)), CFG)
        layer, count = model.up, len(layers._homes)
        del model
        gc.collect()
        with pytest.raises(TypeError, match="or the model is gone"):
            layer(X)
        del layer
        gc.collect()
        assert len(layers._homes) < count

    def test_may_be_quantized_by_themselves(self, model):
        alone = quantize_model(model.up, config.weight_only())
        wanted = quantize_model(
            nnx.clone(Private(nnx.Rngs(0)).up), config.weight_only()
        )
        np.testing.assert_array_equal(alone(X), wanted(X))
        assert (alone(X) != model.up(X)).any()

    def test_move_with_the_model(self, model):
        merged = nnx.merge(*nnx.split(model))
        np.testing.assert_array_equal(merged.up(X), model.up(X))
        for one in (nnx.clone(model), copy.deepcopy(model)):
            np.testing.assert_array_equal(one.up(X), model.up(X))
            nnx.update(one, jax.tree.map(jnp.zeros_like, nnx.state(one, nnx.Param)))
            assert not one.up(X).any() and model.up(X).any()


class Projection(nnx.Module):
    """Private methods that contract a parameter, in a layer and in the model itself."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((8, 8)))

    def __call__(self, x):
        return self._project(x) @ self.w[...].T

    def _project(self, x):
        return x @ self.w[...]

    def _scores(self, x):
        return x @ self._project(x).T

    def _until(self, x, bound):
        while float(jnp.abs(x).max()) < bound:
            x = x + self._project(jnp.sign(x))
        return x


class WithProjection(Projection):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.inner = Projection(rngs)

    def __call__(self, x):
        return self.inner(self._project(x))


class TestPrivateMethods:
    @pytest.mark.parametrize("path", ["", "inner"])
    def test_are_quantized_by_the_rules_of_their_module(self, path):
        rules = [Rule(module=path, cfg=CFG), Rule(cfg=None)]
        floats = WithProjection(nnx.Rngs(0))
        model = quantize_model(floats, rules, strict=True)
        for one, other, differs in (
            (model, floats, not path),
            (model.inner, floats.inner, path == "inner"),
        ):
            for method in ("_project", "_scores"):
                got, wanted = (getattr(x, method)(X) for x in (one, other))
                assert (got != wanted).any() == differs, (path, method)

    def test_are_the_same_within_the_model(self):
        model = quantize_model(WithProjection(nnx.Rngs(0)), CFG, strict=True)
        by_inner = nnx.jit(lambda m: m.inner(m._project(X)))
        np.testing.assert_array_equal(by_inner(model), call(model, X))
        serving = convert(model, X)
        np.testing.assert_array_equal(by_inner(serving), call(serving, X))

    def test_count_for_strict(self):
        rules = Rule(module="inner", cfg=CFG)
        model = quantize_model(WithProjection(nnx.Rngs(0)), rules, strict=True)
        assert model.inner._project(X).shape == X.shape
        with pytest.raises(
            ValueError, match=r"(?s)strict=True, and 1 .* no rule names"
        ):
            model._project(X)

    def test_that_need_values_run_as_they_are(self, caplog):
        model = quantize_model(WithProjection(nnx.Rngs(0)), CFG)
        x = X
        while float(jnp.abs(x).max()) < 10.0:
            x = x + model._project(jnp.sign(x))
        np.testing.assert_array_equal(model._until(X, 10.0), x)
        assert "WithProjection._until needs concrete values" in caplog.text
        strict = quantize_model(WithProjection(nnx.Rngs(0)), CFG, strict=True)
        with pytest.raises(jax.errors.ConcretizationTypeError):
            strict._until(X, 10.0)


class Outer(nnx.Module):
    def __init__(self, inner, rngs, **kwargs):
        self.inner = inner
        self.head = nnx.Linear(4, 4, rngs=rngs, **kwargs)

    def __call__(self, x):
        return self.head(self.inner(x))


PRESETS = {
    "int8": CFG,
    "static": config.static_int8(),
    "lsq": config.lsq(),
    "smoothed": config.smoothquant(),
}


class TestInner:
    @pytest.mark.parametrize("change", [convert, convert_in_place])
    @pytest.mark.parametrize("preset", mostly_slow(PRESETS.values(), CFG))
    def test_of_a_float_model_are_converted_with_it(self, preset, change):
        inner = quantize_model(Mlp(nnx.Rngs(0)), preset)
        init_state(inner, X)
        if inner.aqt.statistics:
            calibrate(inner, [X])
        outer = Outer(inner, nnx.Rngs(1))
        planned = plan(outer, X)
        quantized = {one.path: one.cfg for one in planned.quantized()}
        assert set(quantized) == {"inner/up", "inner/down"}
        wanted = call(outer, X)
        serving = change(outer, X)
        np.testing.assert_array_equal(call(serving, X), wanted)
        assert set(serving.aqt.frozen) == {"inner/up", "inner/down"}
        kernels = serving.inner.up.kernel, serving.inner.down.kernel
        assert all(map(aqtlite.is_frozen, kernels))
        with pytest.raises(ValueError, match="is number 1 of the parameters"):
            serving.inner(X)

    def test_beside_injected_layers_and_rules(self):
        inner = quantize_model(Mlp(nnx.Rngs(0)), CFG)
        other = config.weight_only()
        injected = Outer(inner, nnx.Rngs(1), dot_general=AqtDotGeneral(other))
        ruled = quantize_model(Outer(inner, nnx.Rngs(1)), other, strict=True)
        for outer in (injected, ruled):
            cfgs = {one.path: one.cfg for one in plan(outer, X).quantized()}
            assert cfgs == {"inner/up": CFG, "inner/down": CFG, "head": other}
            trained = call(outer, X)
            np.testing.assert_array_equal(call(convert(outer, X), X), trained)

    def test_are_calibrated_with_it(self):
        inner = quantize_model(Mlp(nnx.Rngs(0)), config.static_int8())
        outer = quantize_model(Outer(inner, nnx.Rngs(1)), CFG)
        calibrate(outer, [X])
        assert set(outer.aqt.statistics) == {"inner/up", "inner/down"}
        np.testing.assert_array_equal(call(convert(outer, X), X), call(outer, X))

    def test_have_layers_of_their_own(self):
        inner = quantize_model(Mlp(nnx.Rngs(0)), CFG)
        outer = quantize_model(Outer(inner, nnx.Rngs(1)), config.weight_only())
        np.testing.assert_array_equal(outer.inner.up(X), inner.up(X))
        wanted = quantize_model(Outer(inner, nnx.Rngs(1)).head, config.weight_only())
        np.testing.assert_array_equal(outer.head(X[:, :4]), wanted(X[:, :4]))

    def test_that_are_converted_stay_so(self):
        inner = convert(quantize_model(Mlp(nnx.Rngs(0)), CFG), X)
        outer = quantize_model(Outer(inner, nnx.Rngs(1)), config.weight_only())
        serving = convert(outer, X)
        np.testing.assert_array_equal(call(serving, X), call(outer, X))
        assert set(serving.inner.aqt.frozen) == {"up", "down"}
        assert set(serving.aqt.frozen) == {"head"}

"""A quantized NNX model is a model of its class, with its paths and its methods."""

import copy
import functools
import pickle
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from aqtlite import Rule, config
from aqtlite.flax.nnx import calibrate, convert, plan, quantize_model
from tests.flax.nnx.models import CFG, TOKENS, Mlp, Transformer, X, call, values

pytestmark = pytest.mark.code("quick")

FLOAT = Rule(cfg=None)


class Counter:
    """Something that is no array."""


class Model(nnx.Module):
    """Methods of many kinds."""

    sizes = (8, 16)

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.name = "model"
        self.steps = 0

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return nnx.relu(self.up(x))

    @nnx.jit
    def decode(self, x):
        return self.down(x)

    def described(self, x):
        return {"out": self.encode(x), "name": self.name, "none": None}

    def describe(self):
        return f"{self.name} of {self.parameters} parameters"

    @property
    def parameters(self):
        return sum(x.size for x in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def init_cache(self, batch):
        self.cache = nnx.Cache(jnp.zeros((batch, 16)))
        self.layers = nnx.List([])

    def train(self, **attributes):
        super().train(**attributes)
        self.steps += 1

    def counts(self, x):
        self.steps += 1
        return self.encode(x)

    def generate(self, x, limit):
        while float(jnp.abs(x).max()) < limit:
            x = x + jnp.abs(self(x)) + 1
        return x

    @classmethod
    def make(cls):
        return cls(nnx.Rngs(0))

    @staticmethod
    def loss(x):
        return (x**2).mean()


@pytest.fixture(scope="module")
def model():
    return quantize_model(Model.make(), CFG)


class TestSameModel:
    def test_class(self, model):
        assert isinstance(model, Model)
        assert type(model).__name__ == "Model"
        assert type(model) is type(quantize_model(Model.make(), config.weight_only()))
        assert type(model) is not Model

    def test_paths(self):
        """So that states are exchanged, and filters and optimizers are as before."""
        floats = Transformer(nnx.Rngs(0), 1)
        quantized = quantize_model(Transformer(nnx.Rngs(1), 1), CFG)
        states = [nnx.to_flat_state(nnx.state(one)) for one in (floats, quantized)]
        paths, others = ([(path, type(x)) for path, x in one] for one in states)
        assert paths == others
        nnx.update(quantized, nnx.state(floats))
        expected = quantize_model(floats, CFG)
        np.testing.assert_array_equal(call(quantized, TOKENS), call(expected, TOKENS))

    def test_float_model_stays_and_shares_its_variables(self):
        floats = Mlp(nnx.Rngs(0))
        before, out = nnx.graphdef(floats), call(floats, X)
        quantized = quantize_model(floats, CFG)
        assert nnx.graphdef(floats) == before
        np.testing.assert_array_equal(call(floats, X), out)
        assert (call(quantized, X) != out).any()
        assert quantized.up.kernel is floats.up.kernel
        quantized.eval()
        assert nnx.graphdef(floats) == before

    def test_other_rules_take_the_place_of_the_first(self, model):
        other = quantize_model(model, config.weight_only(4))
        (one, _) = plan(other, X).quantized()
        assert one.cfg == config.weight_only(4)
        (one, _) = plan(model, X).quantized()
        assert one.cfg == CFG
        np.testing.assert_array_equal(
            call(quantize_model(model, FLOAT), X), call(Model.make(), X)
        )


class TestMethods:
    def test_contractions_of_all_methods_are_quantized(self, model):
        floats = Model.make()
        h = jnp.ones((4, 16)) * X[:, :1]
        for method, x in (("__call__", X), ("encode", X), ("decode", h)):
            got, exact = getattr(model, method)(x), getattr(floats, method)(x)
            assert (got != exact).any(), method
            np.testing.assert_allclose(got, exact, atol=0.1 * jnp.abs(exact).max())
            assert len(plan(model, x, method=method).quantized()) == 1 + (x is X) * (
                method == "__call__"
            )

    def test_results_that_are_no_arrays(self, model):
        described = model.described(X)
        np.testing.assert_array_equal(described["out"], model.encode(X))
        assert (described["name"], described["none"]) == ("model", None)

    def test_methods_that_contract_nothing_run_as_they_are(self):
        model = quantize_model(Model.make(), config.static_int8())
        assert model.describe() == "model of 280 parameters"
        model.init_cache(3)
        assert model.cache.shape == (3, 16)
        assert not len(model.layers)
        model.train()
        assert model.steps == 1
        assert not model.aqt.use_running_average
        model.eval()
        assert model.aqt.use_running_average
        assert model.loss(X) == Model.loss(X)
        assert model.sizes == (8, 16)
        assert isinstance(type(model).make(), Model)

    def test_what_changes_the_structure_is_refused(self, model):
        with pytest.raises(ValueError, match=r"Model.counts changes the structure"):
            model.counts(X)
        assert model.steps == 0
        assert Model.counts(model, X).shape == (4, 16)
        assert model.steps == 1
        model.steps = 0

    def test_loops_of_python_run_by_the_class(self, model):
        with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
            model.generate(X, 10.0)
        assert "Model.generate(model, ...)" in "".join(caught.value.__notes__)
        x = X
        while float(jnp.abs(x).max()) < 10.0:
            x = x + jnp.abs(model(x)) + 1
        np.testing.assert_array_equal(Model.generate(model, X, 10.0), x)

    def test_layers_are_those_of_the_model(self, model):
        assert isinstance(model.up, nnx.Linear)
        assert type(model.up).__name__ == "Linear"
        assert model.up is model.up


class TestNnx:
    """What users do with models."""

    @pytest.fixture(scope="class")
    def wanted(self, model):
        return np.asarray(call(model, X))

    @pytest.mark.parametrize(
        "change",
        {
            "split and merge": lambda model: nnx.merge(*nnx.split(model)),
            "by types": lambda model: nnx.merge(*nnx.split(model, nnx.Param, ...)),
            "clone": nnx.clone,
            "view": lambda model: nnx.view(model, raise_if_not_found=False),
            "deepcopy": copy.deepcopy,
            "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        }.values(),
    )
    def test_copies(self, change, model, wanted):
        copied = change(model)
        assert type(copied) is type(model)
        assert nnx.graphdef(copied) == nnx.graphdef(model)
        np.testing.assert_array_equal(call(copied, X), wanted)

    def test_pickle_of_states_and_frozen_weights(self):
        model = quantize_model(Weight(nnx.Rngs(0)), config.static_int8())
        calibrate(model, [X])
        for one in (model, convert(model, X)):
            copied = pickle.loads(pickle.dumps(one))
            assert type(copied) is type(one)
            assert nnx.graphdef(copied) == nnx.graphdef(one)
            np.testing.assert_array_equal(call(copied, X), call(one, X))

    def test_optimizers_of_the_float_model(self):
        floats = Model.make()
        optimizer = nnx.Optimizer(floats, optax.adam(1e-2), wrt=nnx.Param)
        model = quantize_model(floats, CFG)

        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda m: Model.loss(m(X) - 1))(model)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer)) for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        assert (floats.up.kernel[...] == model.up.kernel[...]).all()

    def test_in_a_model(self, model, wanted):
        class Outer(nnx.Module):
            def __init__(self, inner):
                self.inner = inner

            def __call__(self, x):
                return self.inner(x)

        np.testing.assert_array_equal(call(Outer(model), X), wanted)

    def test_serving_keeps_class_and_methods(self, model, wanted):
        serving = convert(model, X)
        assert type(serving) is type(model)
        np.testing.assert_array_equal(call(serving, X), wanted)
        np.testing.assert_array_equal(serving.encode(X), model.encode(X))
        assert serving.name == "model"
        with pytest.raises(ValueError, match="converted already"):
            quantize_model(serving, CFG)

    def test_filters_of_floats_are_those_of_the_model(self, model):
        before = values(Model.make(), nnx.Param)
        jax.tree.map(np.testing.assert_array_equal, values(model, nnx.Param), before)


class Weight(nnx.Module):
    """A model without functions among its attributes."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 4)))

    def __call__(self, x):
        return x @ self.kernel[...]


class Leaf(Weight, pytree=False):
    """A model that is no pytree, with a list of its own."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.counters = [Counter()]


class Shared(nnx.Module):
    """A layer that knows the model."""

    def __init__(self, rngs):
        self.layer = Weight(rngs)
        self.layer.parent = self
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.layer(x) * self.layer.parent.scale[...]


@pytest.mark.parametrize("cls", [Leaf, Shared])
def test_models_of_other_kinds(cls):
    model = quantize_model(cls(nnx.Rngs(0)), CFG)
    out = call(model, X)
    assert (out != call(cls(nnx.Rngs(0)), X)).any()
    np.testing.assert_array_equal(call(convert(model, X), X), out)


def test_partial_methods():
    class Partial(Weight):
        def scaled(self, x, factor):
            return self(x) * factor

        doubled = functools.partialmethod(scaled, factor=2.0)

    model = quantize_model(Partial(nnx.Rngs(0)), CFG)
    np.testing.assert_array_equal(model.doubled(X), 2 * model(X))


def test_registers_of_classes_keep_the_model():
    class Registered(Weight):
        classes: ClassVar = {}

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.classes[cls.__name__] = cls

    class Model(Registered):
        pass

    quantize_model(Model(nnx.Rngs(0)), CFG)
    assert Registered.classes["Model"] is Model


def test_outputs_of_methods_are_captured(model):
    capture = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    out, captured = capture(X)
    assert set(captured) == {"__call__", "up", "down"}
    np.testing.assert_array_equal(captured["__call__"].get_value()[0], out)


def test_an_attribute_of_that_name_is_refused():
    class Taken(Weight):
        aqt = 3

    with pytest.raises(ValueError, match="Taken has an attribute 'aqt'"):
        quantize_model(Taken(nnx.Rngs(0)), CFG)

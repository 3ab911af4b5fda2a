"""What calls of NNX models sow arrives as it does from the float model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import Rule
from aqtlite.flax.nnx import convert, quantize_model
from tests.flax.nnx.models import CFG, X, call, values

pytestmark = [
    pytest.mark.code("quick"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]


FLOAT = Rule(cfg=None)


class AuxLoss(nnx.Intermediate):
    """A type of its own, as mixtures of experts have for their losses."""


class Experts(nnx.Module):
    """A layer that sows, twice, and counts its calls."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        h = self.up(x)
        self.sow(AuxLoss, "loss", (h**2).mean())
        self.sow(nnx.Intermediate, "hidden", h)
        return h


class Model(nnx.Module):
    """Layers in a list, one of them called twice, and a sum that is reduced."""

    def __init__(self, rngs):
        self.layers = nnx.List([Experts(rngs), Experts(rngs)])

    def __call__(self, x):
        first, second = self.layers
        out = first(second(first(x)))
        for _ in range(2):
            self.sow(
                nnx.Intermediate,
                "total",
                out.sum(),
                init_fn=lambda: 0.0,
                reduce_fn=lambda before, new: before + new,
            )
        return out


class Stacked(nnx.Module):
    """Layers that sow in a scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return Experts(rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


def assert_same(one, other):
    """Asserts that two states have equal paths, types of variables, and values."""
    one, other = dict(nnx.to_flat_state(one)), dict(nnx.to_flat_state(other))
    assert {k: type(v) for k, v in one.items()} == {
        k: type(v) for k, v in other.items()
    }
    for path, variable in one.items():
        expected = other[path].get_value()
        jax.tree.map(np.testing.assert_array_equal, variable.get_value(), expected)


def eager(model, x):
    return model(x)


@pytest.mark.parametrize("run", [eager, call])
@pytest.mark.parametrize("cls", [Model, Stacked])
def test_is_what_the_float_model_sows(cls, run):
    """In types, paths and values: at the first call, at the next, and after `pop`."""
    model = cls(nnx.Rngs(0))
    quantized = quantize_model(cls(nnx.Rngs(0)), FLOAT)
    for popped in ((), (AuxLoss,), (nnx.Intermediate,)):
        np.testing.assert_array_equal(run(quantized, X), run(model, X))
        assert_same(nnx.state(quantized), nnx.state(model))
        for kind in popped:
            gone = nnx.pop(model, kind)
            assert jax.tree.leaves(gone)
            assert_same(nnx.pop(quantized, kind), gone)


def test_is_differentiated():
    """A loss of a layer counts for its weights."""

    @nnx.jit
    @nnx.value_and_grad
    def loss(model):
        model(X)
        sown = nnx.pop(model, AuxLoss)
        return sum(jax.tree.leaves(sown))

    value, grads = loss(quantize_model(Model(nnx.Rngs(0)), CFG))
    expected, exact = loss(Model(nnx.Rngs(0)))
    np.testing.assert_allclose(value, expected, rtol=0.05)
    for i in range(2):
        got = grads["layers"][i]["up"]["kernel"][...]
        wanted = exact["layers"][i]["up"]["kernel"][...]
        assert jnp.linalg.norm(got - wanted) < 0.1 * jnp.linalg.norm(wanted)


def test_serving_models_sow():
    model = quantize_model(Model(nnx.Rngs(0)), CFG)
    serving = convert(model, X)
    np.testing.assert_array_equal(call(serving, X), call(model, X))
    for kind in (AuxLoss, nnx.Intermediate):
        assert jax.tree.leaves(nnx.state(model, kind))
        jax.tree.map(
            np.testing.assert_array_equal, values(serving, kind), values(model, kind)
        )


def test_is_captured():
    model = Model(nnx.Rngs(0))
    kinds = (AuxLoss, nnx.Intermediate)
    _, *expected = nnx.capture(model, *kinds)(X)
    _, *captured = nnx.capture(quantize_model(model, FLOAT), *kinds)(X)
    for one, other in zip(captured, expected, strict=True):
        assert jax.tree.leaves(other)
        assert_same(one, other)
    # Nothing of the capture is left: what is sown is in the model again.
    quantized = quantize_model(model, FLOAT)
    quantized(X)
    assert jax.tree.leaves(nnx.pop(quantized, AuxLoss))

"""Statistics, learned scales, and statistics of gradients, as variables of NNX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from aqtlite import calibration, config
from aqtlite.flax.nnx import (
    GradientStatistics,
    Statistics,
    calibrate,
    convert,
    init_state,
    overwrite_with_gradient,
    quantize_model,
)
from aqtlite.quantization.states.fixed_scale import FixedScale
from tests.flax.nnx.models import CFG, Block, Mlp, X, call, values

pytestmark = pytest.mark.code("quick")


class Graph(NamedTuple):
    nodes: jax.Array


def mlp(cfg):
    return quantize_model(Mlp(nnx.Rngs(0)), cfg)


def loss(model):
    return jnp.mean((model(X) - 1) ** 2)


def same(before, after):
    return jax.tree.map(np.array_equal, before, after)


class TestStatistics:
    @pytest.fixture(scope="class")
    def model(self):
        model = mlp(config.static_int8())
        calibrate(model, [X, 2 * X])
        return model

    def test_are_gathered_in_training_alone(self, model):
        model = nnx.clone(model)
        before = values(model, Statistics)
        call(model, 9 * X)
        assert jax.tree.all(same(before, values(model, Statistics)))
        model.train()
        call(model, 9 * X)
        assert not any(jax.tree.leaves(same(before, values(model, Statistics))))

    def test_are_no_parameters(self, model):
        assert set(model.aqt.statistics) == {"up", "down"}
        assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 4

    def test_served_equals_trained(self, model):
        serving = convert(model, X)
        np.testing.assert_array_equal(call(serving, X), call(model, X))
        # Scales take the place of statistics, but not in the model of training.
        for name, entry in serving.aqt.statistics.items():
            assert isinstance(entry["lhs"].get_value(), FixedScale)
            kept = model.aqt.statistics[name]["lhs"]
            assert isinstance(kept, calibration.Statistics)

    def test_calibrating_changes_nothing_else(self):
        model = quantize_model(Block(nnx.Rngs(0)), config.static_int8())
        before = values(model)
        calibrate(model, [jnp.ones((1, 4, 8))])
        after = values(model)
        assert after.pop("aqt")
        assert jax.tree.all(same(before, after))

    def test_a_named_tuple_is_one_argument(self):
        class OfGraph(Mlp):
            def __call__(self, graph):
                return super().__call__(graph.nodes)

        model = quantize_model(OfGraph(nnx.Rngs(0)), config.static_int8())
        calibrate(model, [Graph(X)])
        assert set(model.aqt.statistics) == {"up", "down"}

    def test_of_no_batch_are_refused(self):
        model = mlp(config.static_int8())
        with pytest.raises(ValueError, match="init_state"):
            model(X)
        init_state(model, X)
        model.eval()
        with pytest.raises(ValueError, match="no statistics yet"):
            model(X)
        with pytest.raises(ValueError, match="have seen no batch: call what is"):
            convert(model, X)
        with pytest.raises(ValueError, match="no batch"):
            calibrate(model, [])
        with pytest.raises(ValueError, match="gathers statistics"):
            calibrate(mlp(CFG), [X])


def test_learned_scales_are_trained_and_frozen():
    model = mlp(config.lsq(8))
    init_state(model, X)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = values(model.aqt.learned)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))

    step(model, optimizer)
    assert not any(jax.tree.leaves(same(before, values(model.aqt.learned))))
    serving = convert(model, X)
    np.testing.assert_array_equal(call(serving, X), call(model, X))


def test_gradients_take_the_place_of_their_statistics():
    model = mlp(config.fp8(delayed=True))
    init_state(model, X)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, GradientStatistics))

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(loss, argnums=wrt)(model)
        optimizer.update(model, overwrite_with_gradient(model, grads))

    def batches():
        return {
            float(entry["drhs"].batches.get_value())
            for entry in model.aqt.gradient_statistics.values()
        }

    assert batches() == {0.0}
    step(model, optimizer)
    step(model, optimizer)
    assert batches() == {2.0}

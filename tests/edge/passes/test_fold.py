import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.edge import program
from aqtlite.edge.graph import Node
from tests.edge import models

pytestmark = pytest.mark.code("quick")


def _names(made: program.Program) -> list[str]:
    static = made.static
    return [n.operator.name for n in made.graph.nodes if n.output not in static]


def _evaluated(made: program.Program, variables, *args):
    values = made.bind(variables, args)
    return made.result(made.graph.evaluate(values, Node.compute))


class _Block(nn.Module):
    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(self.layer(x))
        return nn.relu((x - 0.5) * 2.0)


@pytest.mark.parametrize(
    "layer, shape, name",
    [
        (nn.Conv(4, (3, 3)), (2, 5, 5, 3), "conv_2d"),
        (nn.Conv(3, (3, 3), feature_group_count=3), (2, 5, 5, 3), "depthwise_conv_2d"),
        (nn.Dense(5), (2, 3), "fully_connected"),
        (nn.DenseGeneral((2, 4)), (2, 3), "fully_connected"),
    ],
)
def test_normalizations_become_weights_and_biases(layer, shape, name):
    model, x = _Block(layer), models.normal(shape)
    variables = models.trained(model, x)
    made = program.make(model, variables, (x,))
    assert [n for n in _names(made) if n != "reshape"] == [name]
    found = _evaluated(made, variables, x)
    np.testing.assert_allclose(found, model.apply(variables, x), rtol=1e-4, atol=1e-5)


def test_what_differs_within_a_channel_is_not_folded():
    w, b = models.normal((3, 4)), models.normal((2, 4))
    made = program.make(lambda v, x: x @ v[0] + v[1], (w, b), (models.normal((2, 3)),))
    assert _names(made) == ["fully_connected", "add"]


def test_what_others_need_is_not_folded():
    w = models.normal((3, 4))

    def function(w, x):
        y = x @ w
        return y, 2 * y + 1

    made = program.make(function, w, (models.normal((2, 3)),))
    assert _names(made) == ["fully_connected", "mul", "add"]


def test_factors_and_summands_without_a_contraction():
    x = models.normal((2, 3))
    v = jnp.array([1.0, -2.0, 3.0])

    def function(v, x):
        return (3.0 - (x - v) / v) * 2.0

    made = program.make(function, v, (x,))
    assert _names(made) == ["mul", "add"]
    np.testing.assert_allclose(
        _evaluated(made, v, x), function(v, x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_gradients_reach_the_parameters_of_a_normalization():
    model, x = _Block(nn.Conv(4, (3, 3))), models.normal((2, 5, 5, 3))
    variables = models.trained(model, x)
    made = program.make(model, variables, (x,))

    def loss(of_graph, v):
        y = _evaluated(made, v, x) if of_graph else model.apply(v, x)
        return jnp.sum(jnp.square(y))

    found, expected = (jax.grad(loss, 1)(flag, variables) for flag in (True, False))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)

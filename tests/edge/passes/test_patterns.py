import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.edge import program
from tests.edge import models

pytestmark = pytest.mark.code("quick")


def _names(function, *shape: int) -> list[str]:
    made = program.make(lambda _, x: function(x), (), (models.normal(shape),))
    return [n.operator.name for n in made.graph.nodes if n.output not in made.static]


def _gelu_in_a_file(x):
    """As an ONNX file of a JAX model has it."""
    cube = x * (x * (np.float32(0.044715) * x))
    return x * (0.5 * (1.0 + jnp.tanh(np.float32(0.7978845608) * (x + cube))))


def _softmax_in_a_file(x):
    largest = jnp.maximum(-jnp.inf, jnp.max(x, 1)).reshape(-1, 1)
    exponentials = jnp.exp(x - largest)
    return exponentials / jnp.sum(exponentials, 1).reshape(-1, 1)


@pytest.mark.parametrize(
    "function, name",
    [
        (nn.gelu, "gelu"),
        (_gelu_in_a_file, "gelu"),
        (_softmax_in_a_file, "softmax"),
        (lambda x: nn.gelu(x, approximate=False), "gelu"),
        (jax.jit(nn.gelu), "gelu"),
        (jax.checkpoint(nn.gelu), "gelu"),
        (jax.nn.hard_swish, "hard_swish"),
        (nn.softmax, "softmax"),
        (nn.log_softmax, "log_softmax"),
        (lambda x: nn.leaky_relu(x, 0.3), "leaky_relu"),
    ],
)
def test_functions_are_one_operator(function, name):
    assert _names(function, 3, 4) == [name]


def test_what_only_resembles_a_pattern_is_none():
    def like_gelu(x):
        return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.05 * x**3)))

    assert "gelu" not in _names(like_gelu, 3, 4)


def test_softmax_over_an_inner_axis_is_transposed():
    names = _names(lambda x: nn.softmax(x, axis=1), 2, 3, 4)
    assert names == ["transpose", "softmax", "transpose"]


def test_variances_are_means_of_squared_deviations():
    """The difference of a mean of squares and a square is nothing in 8 bits."""
    x = models.normal((4, 16)) + 50.0
    model = nn.LayerNorm(use_bias=False, use_scale=False)
    made = program.make(model, {}, (x,))
    names = [n.operator.name for n in made.graph.nodes if n.output not in made.static]
    expected = ["mean", "reshape", "sub", "mul", "mean", "reshape", "add"]
    assert names == [*expected, "log", "mul", "exp", "mul"]
    values = made.graph.evaluate(made.bind({}, (x,)), lambda n, i: n.compute(i))
    np.testing.assert_allclose(
        made.result(values), model.apply({}, x), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("is_clipped", [True, False])
def test_variances_by_products_with_one_over_the_number(is_clipped):
    def variance(x):
        mean = jnp.sum(x, 1) * np.float32(1 / 12)
        difference = jnp.sum(x * x, 1) * np.float32(1 / 12) - mean * mean
        return jnp.maximum(0.0, difference) if is_clipped else difference

    assert _names(variance, 4, 12) == ["mean", "reshape", "sub", "mul", "mean"]
    x = models.normal((4, 12))
    made = program.make(lambda _, x: variance(x), (), (x,))
    values = made.graph.evaluate(made.bind((), (x,)), lambda n, i: n.compute(i))
    np.testing.assert_allclose(made.result(values), x.var(1), rtol=1e-5)

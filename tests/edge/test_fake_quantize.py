import jax
import jax.numpy as jnp
import numpy as np
import optax

from aqtlite import edge
from tests.edge import models


def test_it_rounds_as_the_file_does():
    model, x = models.ConvNet(), models.normal((4, 8, 8, 1))
    variables = models.trained(model, x)
    ranges = edge.calibrate(model, variables, [x])
    rounded = jax.jit(edge.fake_quantize(model, ranges))(variables, x)
    simulation = edge.simulate(model, variables, ranges, x)
    name = "ConvNet/Dense_1/fully_connected"
    low, high = ranges[name]
    difference = np.abs(rounded - simulation.dequantize(name, simulation(x)))
    assert difference.max() <= 2.5 * (high - low) / 255


def test_training():
    x = models.normal((64, 8))
    target = jnp.tanh(x @ (0.3 * models.normal((8, 4), 2)))
    w = 0.3 * models.normal((8, 4), 3)

    def model(w, x):
        return jnp.tanh(x @ w)

    rules = (edge.Rule(weights="int4"),)
    rounded = edge.fake_quantize(model, edge.calibrate(model, w, [x], rules), rules)

    @jax.jit
    @jax.value_and_grad
    def loss(w):
        return jnp.mean(jnp.square(rounded(w, x) - target))

    optimizer = optax.adam(0.02)
    state = optimizer.init(w)
    losses = []
    for _ in range(60):
        value, gradient = loss(w)
        losses.append(value)
        updates, state = optimizer.update(gradient, state)
        w = optax.apply_updates(w, updates)
    assert losses[-1] < 0.05 * losses[0]


def test_gradients_stop_where_values_are_clipped():
    def model(w, x):
        return x @ w

    ranges = edge.Ranges({"input": (-1, 1), "fully_connected": (-1, 1)})
    rounded = edge.fake_quantize(model, ranges)
    gradient = jax.grad(lambda x: rounded(jnp.eye(2), x).sum())
    np.testing.assert_array_equal(gradient(jnp.array([[0.5, 2.0]])), [[1.0, 0.0]])

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")


class _Convolutions(nn.Module):
    """Each kind of a convolution, and what is folded into it."""

    @nn.compact
    def __call__(self, x):
        for groups in (1, 2, 8):
            x = nn.Conv(8, (3, 3), feature_group_count=groups)(x)
            x = nn.relu6(nn.BatchNorm(use_running_average=True)(x))
        x = 0.5 * x + self.param("shift", nn.initializers.normal(), (8,))
        return nn.Dense(6)(x.reshape(x.shape[0], -1))


@pytest.mark.slow
@pytest.mark.code("users")
@pytest.mark.parametrize("weights", ["int8"])
def test_what_is_trained_is_what_the_file_computes(tmp_path, weights):
    model, x = _Convolutions(), models.normal((16, 6, 6, 4))
    variables = models.trained(model, x)
    rules = [edge.Rule(weights=weights)]
    ranges = edge.calibrate(model, variables, [x], rules)
    rounded = edge.fake_quantize(model, ranges, rules)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(params, x):
        y = rounded({**variables, "params": params}, x)
        return jnp.mean(jnp.square(y)), y

    for _ in range(3):
        gradient, _ = gradients(variables["params"], x)
        params = jax.tree.map(lambda w, g: w - 0.05 * g, variables["params"], gradient)
        variables = {**variables, "params": params}
    report = edge.export(model, variables, ranges, x, tmp_path / "m.tflite", rules)
    simulation = edge.simulate(model, variables, ranges, x, rules)
    # Beyond what was calibrated, too.
    wide = 1.2 * x
    (found,) = models.run(tmp_path / "m.tflite", models.integers(simulation, wide))
    (output,) = report.outputs
    served = (found.astype(np.float32) - output.zero_point) * np.float32(output.scale)
    _, trained = gradients(variables["params"], wide)
    np.testing.assert_array_equal(trained, served)


@pytest.mark.slow
def test_gradients_are_those_of_floats_that_are_rounded():
    model, x = _Convolutions(), models.normal((4, 6, 6, 4))
    variables = models.trained(model, x)
    ranges = edge.calibrate(model, variables, [x])

    def gradient(kernels):
        rounded = edge.fake_quantize(model, ranges, kernels=kernels)
        return jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(rounded(v, x)))))(variables)

    for one, other in zip(
        jax.tree.leaves(gradient("xnnpack")),
        jax.tree.leaves(gradient(None)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def test_other_kernels_are_an_error():
    with pytest.raises(ValueError, match="kernels must be one of xnnpack, builtin"):
        edge.fake_quantize(models.ConvNet(), edge.Ranges({}), kernels="onnx")


def test_ranges_that_are_no_table_are_an_error():
    rounded = edge.fake_quantize(nn.Dense(3), {})
    with pytest.raises(TypeError, match=r"edge.Ranges.load returned, got a dict"):
        rounded(
            {"params": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}},
            jnp.ones((2, 4)),
        )


def test_values_far_beyond_a_range_are_clipped():
    ranges = edge.Ranges({"input": (-1, 1), "add": (-2, 2)})
    x = jnp.array([-1e30, -1.5e5, -1e5, 1e5, 1e30])
    for kernels in (None, "xnnpack"):
        rounded = edge.fake_quantize(lambda w, x: x + x, ranges, kernels=kernels)
        np.testing.assert_allclose(rounded((), x), 2 * np.sign(x), atol=0.02)


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

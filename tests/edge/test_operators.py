"""Functions of JAX as operators of a file: what is simulated is what is computed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")

_W, _X = 0.5 * models.normal((8, 16), 3), models.normal((8, 8), 4)
_TRIANGLE = np.tril(np.ones((4, 4), bool))


def _squares(x):
    return x.reshape(-1, 4, 4)


GROUPS = {
    "activations": {
        "elu": nn.elu,
        "gelu": nn.gelu,
        "gelu of erf": lambda x: nn.gelu(x, approximate=False),
        "hard_swish": jax.nn.hard_swish,
        "leaky_relu": lambda x: nn.leaky_relu(x, 0.2),
        "log_softmax": nn.log_softmax,
        "relu": nn.relu,
        "relu6": jax.nn.relu6,
        "sigmoid": nn.sigmoid,
        "silu": nn.silu,
        "softmax": nn.softmax,
        "softmax of an inner axis": lambda x: nn.softmax(_squares(x), axis=1),
        "softplus": nn.softplus,
        "tanh": jnp.tanh,
    },
    "arithmetic": {
        "abs": jnp.abs,
        "add": lambda x: x + x[::-1],
        "clip": lambda x: jnp.clip(x, -0.7, 1.2),
        "clip to an activation": lambda x: jnp.clip(x, -1, 1),
        "cube": lambda x: x**3,
        "divide by a norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
        "divide by a number": lambda x: x / 3,
        "exp": lambda x: jnp.exp(-x),
        "inverse of a root": lambda x: jnp.sqrt(jnp.abs(x) + 1) ** -1,
        "log": lambda x: jnp.log(jnp.abs(x) + 1),
        "maximum": lambda x: jnp.maximum(x, x[::-1]),
        "minimum": lambda x: jnp.minimum(x, x[::-1]),
        "multiply": lambda x: x * x[::-1],
        "negate": lambda x: -x,
        "subtract": lambda x: 1 - jnp.tanh(x),
    },
    "moves": {
        "broadcast": lambda x: jnp.broadcast_to(x[:, None], (8, 2, 16)),
        "concatenate": lambda x: jnp.concatenate([x, jnp.tanh(x)], -1),
        "flip": lambda x: jnp.flip(x, -1),
        "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
        "roll": lambda x: jnp.roll(x, 1, -1),
        "slice": lambda x: x[:, 2:10:2],
        "split": lambda x: jnp.split(x, 2, axis=1)[1],
        "stack": lambda x: jnp.stack([x, x + 1]),
        "tile": lambda x: jnp.tile(x, (1, 2)),
        "transpose": lambda x: _squares(x).transpose(1, 0, 2),
    },
    "contractions": {
        "attention": lambda x: jnp.einsum("bij,bkj->bik", _squares(x), _squares(x)),
        "matrices": lambda x: x @ x.T,
        "integers": lambda x: jnp.einsum(
            "hqk,h->hqk", nn.softmax(_squares(x)), np.ones(8, np.int32)
        ),
        "masked": lambda x: nn.softmax(jnp.where(_TRIANGLE, _squares(x), -1e9)),
        "masked by a sum": lambda x: nn.softmax(
            _squares(x) + jnp.where(_TRIANGLE, 0.0, -1e9)
        ),
    },
    "reductions": {
        "average pool": lambda x: nn.avg_pool(_squares(x)[..., None], (2, 2), (2, 2)),
        "average pool, padded": lambda x: nn.avg_pool(
            _squares(x)[..., None], (3, 3), (2, 2), padding="SAME"
        ),
        "max": lambda x: x.max(-1),
        "max pool": lambda x: nn.max_pool(_squares(x), (2,), (2,)),
        "max pool, channels first": lambda x: lax.reduce_window(
            _squares(x)[:, None], -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
        ),
        "max pool, one axis of channels first": lambda x: lax.reduce_window(
            _squares(x), -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID"
        ),
        "max pool, padded": lambda x: nn.max_pool(
            _squares(x)[..., None], (3, 3), (2, 2), padding="SAME"
        ),
        "mean": lambda x: x.mean(-1),
        "mean of an image": lambda x: _squares(x)[..., None].mean((1, 2)),
        "min": lambda x: x.min(0),
        "standard deviation": lambda x: jnp.std(x, -1),
        "sum": lambda x: x.sum(-1),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_simulated(tmp_path, group):
    functions = GROUPS[group]

    def model(w, x):
        x = x @ w
        return [function(x) for function in functions.values()]

    report, found = models.assert_simulated(tmp_path / "m.tflite", model, _W, _X)
    assert report.float_operators == ()
    # The integers stand for what the float function gives, where nothing is clipped.
    ranges = edge.calibrate(model, _W, [_X])
    rounded = jax.device_get(jax.jit(edge.fake_quantize(model, ranges))(_W, _X))
    # And training gives what they stand for.
    simulation = edge.simulate(model, _W, ranges, _X)
    program = simulation.deployed.program
    outputs = [program.names[value] for value in program.graph.outputs]
    simulated = jax.jit(simulation)(_X)
    for name, one, integers in zip(outputs, rounded, simulated, strict=True):
        np.testing.assert_array_equal(one, simulation.dequantize(name, integers))
    floats = jax.device_get(jax.jit(model)(_W, _X))
    for name, one, expected in zip(functions, rounded, floats, strict=True):
        spread = float(expected.max() - expected.min())
        error = np.abs(one - expected)
        assert np.median(error) <= 0.03 * spread, name
    assert len(found) == len(functions)


class _Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        one = nn.Conv(4, (3,), padding="CAUSAL")(x.reshape(x.shape[0], -1, 3))
        dilated = nn.Conv(4, (3, 3), kernel_dilation=2)(x)
        grouped = nn.Conv(6, (3, 3), feature_group_count=3, padding="VALID")(x)
        uneven = nn.Conv(2, (3, 3), padding=((0, 2), (1, 0)))(x)
        heads = nn.DenseGeneral((2, 3))(x)
        back = nn.DenseGeneral(4, axis=(-2, -1))(heads)
        return one, nn.relu(dilated), grouped, uneven, back


@pytest.mark.slow
def test_geometries(tmp_path):
    x = models.normal((2, 6, 6, 3))
    variables = models.trained(_Convolutions(), x)
    path = tmp_path / "m.tflite"
    report, _ = models.assert_simulated(path, _Convolutions(), variables, x)
    assert report.float_operators == ()


REFUSED = {
    "integers": (
        lambda x: jnp.einsum(
            "ij,ij->ij", x, jnp.argmax(x, -1)[:, None] + jnp.arange(16)
        ),
        "int32 and computed",
    ),
    "comparison": (lambda x: jnp.where(x > 0.3, x, 0.5), "comparisons"),
    "argmax": (lambda x: jnp.argmax(x, -1), "same order"),
    "cumsum": (lambda x: jnp.cumsum(x, -1), "no integer operator"),
    "quotient": (lambda x: x / (jnp.abs(x) + 1), "quotients"),
    "power": (lambda x: jnp.abs(x) ** 0.3, "power 0.3"),
    "sort": (lambda x: jnp.sort(x, -1), "sort"),
    "sort by several keys": (
        lambda x: jax.lax.sort((x, -x), num_keys=2),
        "sorts by several keys, and runtimes by one, in float or not: .*exported$",
    ),
    "gather": (lambda x: x[jnp.array([0, 1]), jnp.array([2, 3])], "jnp.take"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        edge.calibrate(lambda w, x: function(x @ w), _W, [_X])


def test_loops_of_known_length_are_unrolled(tmp_path):
    weights = models.normal((3, 8, 8), 5) / 3

    def model(weights, x):
        def step(carry, weight):
            carry = jnp.tanh(carry @ weight)
            return carry, carry.sum(-1)

        return jax.lax.scan(step, x, weights, reverse=True)

    report, _ = models.assert_simulated(tmp_path / "m.tflite", model, weights, _X)
    assert report.counts()["FULLY_CONNECTED"] == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ w),
        lambda w, x: jax.lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y - 1, x),
    ],
    ids=["cond", "while"],
)
def test_control_flow_that_depends_on_data_is_refused(function):
    with pytest.raises(ValueError, match="no control flow, in float or not"):
        edge.calibrate(function, _W, [_X])

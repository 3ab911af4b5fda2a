import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.edge.arithmetic import contractions
from aqtlite.edge.grid import Quantized
from tests.common import mostly_slow
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, constant, grid, integers

_X = grid(0.0513, 7)
_ACTIVATIONS = {
    None: ((-np.inf, np.inf), lambda x: x),
    "relu": ((0.0, np.inf), jax.nn.relu),
    "relu6": ((0.0, 6.0), jax.nn.relu6),
}


def _weights(shape, dtype="int8", axis=None):
    rng = np.random.default_rng(sum(shape))
    bound = {"int8": 127, "int4": 7, "int2": 1}[dtype]
    axis = len(shape) - 1 if axis is None else axis
    scales = rng.uniform(0.5, 2, shape[axis]) / bound
    values = rng.integers(-bound, bound + 1, shape).astype(np.int8)
    return values, grid(scales, dtype=dtype, axis=axis)


def _bias(x_grid, weights_grid):
    rng = np.random.default_rng(1)
    integers = rng.integers(-3000, 3000, weights_grid.scale.shape).astype(np.int32)
    of = grid(x_grid.scale * weights_grid.scale, dtype="int32", axis=0)
    return Quantized(integers, of), integers * of.scale


def _fully_connected(
    shape=(60, 48), dtype="int8", activation=None, x_grid=_X, kernels="xnnpack"
):
    weights, weights_grid = _weights((shape[-1], 19), dtype)
    bias, float_bias = _bias(x_grid, weights_grid)
    clamp, function = _ACTIVATIONS[activation]
    largest = np.iinfo(x_grid.dtype).max
    to = grid(0.04 * largest * x_grid.scale, x_grid.zero_point and 11, x_grid.dtype)
    x = integers(np.random.default_rng(0), shape, x_grid.dtype)
    x[0], x[1] = np.iinfo(x_grid.dtype).min, largest

    def model(x):
        return function(x @ constant(weights, weights_grid) + float_bias)

    def simulate(x):
        constants = Quantized(jnp.asarray(weights), weights_grid), bias
        return contractions.fully_connected(x, *constants, to, clamp, kernels)

    return Case(model, ((x, x_grid),), to, simulate)


def _conv(
    strides=(1, 1),
    padding="SAME",
    dilation=(1, 1),
    groups=1,
    features=10,
    channels=6,
    dtype="int8",
    activation=None,
    kernels="xnnpack",
):
    weights, weights_grid = _weights((3, 3, channels // groups, features), dtype)
    bias, float_bias = _bias(_X, weights_grid)
    clamp, function = _ACTIVATIONS[activation]
    to = grid(0.11, 11)
    x = integers(np.random.default_rng(0), (2, 9, 8, channels))

    def model(x):
        convolved = lax.conv_general_dilated(
            x,
            constant(weights, weights_grid),
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return function(convolved + float_bias)

    def simulate(x):
        constants = Quantized(jnp.asarray(weights), weights_grid), bias
        geometry = strides, padding, dilation, groups
        return contractions.conv_2d(x, *constants, to, *geometry, clamp, kernels)

    return Case(model, ((x, _X),), to, simulate)


@pytest.mark.parametrize("kernels", ["xnnpack", "builtin", "reference"])
def test_fully_connected_equals_the_interpreter(kernels):
    case = functools.partial(_fully_connected, kernels=kernels)
    interpreter.check(
        {
            "plain": case(),
            "three_axes": case((4, 15, 48), activation="relu"),
            "relu6": case(activation="relu6"),
            "int4": case(dtype="int4"),
            "int2": case(dtype="int2"),
        },
        kernels,
    )


@pytest.mark.parametrize(
    "kernels", mostly_slow(["xnnpack", "builtin", "reference"], "xnnpack")
)
def test_convolutions_equal_the_interpreter(kernels):
    case = functools.partial(_conv, kernels=kernels)
    depthwise = functools.partial(case, groups=6, features=6)
    cases = {
        "same": case(),
        "strided": case((2, 2), activation="relu"),
        "dilated": case(padding="VALID", dilation=(2, 2), activation="relu6"),
        "grouped": case(groups=2),
        "depthwise": depthwise(activation="relu6"),
        "depthwise_dilated": depthwise(dilation=(2, 2)),
        "multiplied": depthwise((2, 2), features=12),
        "one_channel": case(channels=1, features=4),
        "int4": case(dtype="int4"),
    }
    if kernels != "reference":  # It has no depthwise convolution of int4.
        tens = {"channels": 10, "groups": 10, "features": 10}
        cases["depthwise_int4"] = case(dtype="int4", **tens)
    interpreter.check(cases, kernels)


@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_products_of_activations_equal_the_interpreter(kernels):
    rng = np.random.default_rng(0)
    y_grid, symmetric, to = grid(0.0317, -5), grid(0.0317), grid(0.13, 11)
    x, y = integers(rng, (3, 40, 33)), integers(rng, (3, 33, 20))

    def batch_matmul(y_grid):
        return Case(
            jnp.matmul,
            ((x, _X), (y, y_grid)),
            to,
            lambda x, y: contractions.batch_matmul(x, y, to, kernels),
        )

    interpreter.check(
        {
            "matmul": Case(
                jnp.matmul,
                ((x[0], _X), (y[0], y_grid)),
                to,
                lambda x, y: contractions.matmul(x, y, to, kernels),
            ),
            "batch_matmul": batch_matmul(y_grid),
            "symmetric": batch_matmul(symmetric),
            "by_constant": Case(
                lambda x: x @ constant(y, symmetric),
                ((x, _X),),
                to,
                lambda x: contractions.batch_matmul(
                    x, Quantized(jnp.asarray(y), symmetric), to, kernels
                ),
            ),
        },
        kernels,
    )


def test_int16_equals_the_interpreter():
    rng = np.random.default_rng(0)
    x_grid, y_grid = grid(0.0005, dtype="int16"), grid(0.0003, dtype="int16")
    to = grid(0.0013, dtype="int16")
    # Sums of the first rows do not fit in 32 bits.
    x, y = integers(rng, (2, 20, 33), "int16"), integers(rng, (2, 33, 15), "int16")
    x[:, 0] = 32767
    y[:, :, 0] = 32767
    interpreter.check(
        {
            "fully_connected": _fully_connected(x_grid=x_grid),
            "batch_matmul": Case(
                jnp.matmul,
                ((x, x_grid), (y, y_grid)),
                to,
                lambda x, y: contractions.batch_matmul(x, y, to),
            ),
        }
    )


def test_refuses_what_litert_gets_wrong():
    x = jnp.zeros((1, 4, 4, 1), jnp.int16)
    weights, x_grid = Quantized(*_weights((3, 3, 1, 2))), grid(0.001, dtype="int16")
    with pytest.raises(ValueError, match="int32 bias as int64"):
        contractions.conv_2d(Quantized(x, x_grid), weights, None, x_grid)


def test_refuses_sums_of_int16_that_it_cannot_hold():
    of = grid(0.001, dtype="int16")
    x, y = (
        Quantized(jnp.zeros(shape, jnp.int16), of)
        for shape in ((1, 2, 257), (1, 257, 2))
    )
    with pytest.raises(ValueError, match="more than 256 products"):
        contractions.batch_matmul(x, y, of)

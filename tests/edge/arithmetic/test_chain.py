"""Operators that follow one another in one model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from aqtlite.edge.arithmetic import (
    binary,
    contractions,
    pooling,
    reductions,
    rescaling,
    softmax,
    unary,
)
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, constant, fake_quant, grid, integers

_RNG = np.random.default_rng(0)
_RELU6 = (0.0, 6.0)
_X = grid(0.031, -3)
_CONV, _DEPTHWISE, _SUM = grid(6 / 255, -128), grid(0.041, 9), grid(0.047, -11)
_GATE, _PRODUCT = grid(1 / 256, -128), grid(0.029, -30)
_JOINED, _MEAN, _LOGITS = grid(0.037, 4), grid(0.011, -21), grid(0.05, 17)
_PROBABILITIES = grid(1 / 256, -128)
_SPEC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def _weights(*shape):
    scales = _RNG.uniform(0.5, 2, shape[-1]) / 400
    values = np.maximum(integers(_RNG, shape), -127)
    return values, grid(scales, axis=len(shape) - 1)


_KERNEL, _WINDOW, _DENSE = _weights(3, 3, 5, 8), _weights(3, 3, 1, 8), _weights(16, 7)


def _features(x):
    convolved = lax.conv_general_dilated(x, constant(*_KERNEL), (1, 1), "SAME", **_SPEC)
    convolved = fake_quant(jax.nn.relu6(convolved), _CONV)
    depthwise = fake_quant(
        lax.conv_general_dilated(
            convolved,
            constant(*_WINDOW),
            (1, 1),
            "SAME",
            feature_group_count=8,
            **_SPEC,
        ),
        _DEPTHWISE,
    )
    total = fake_quant(convolved + depthwise, _SUM)
    gate = fake_quant(jax.nn.sigmoid(total), _GATE)
    product = fake_quant(total * gate, _PRODUCT)
    pooled = fake_quant(nn.avg_pool(product, (2, 2), (2, 2)), _PRODUCT)
    largest = fake_quant(nn.max_pool(total, (2, 2), (2, 2)), _SUM)
    joined = fake_quant(jnp.concatenate([pooled, largest], -1), _JOINED)
    return jnp.mean(joined, (1, 2))


def _probabilities(x):
    logits = fake_quant(fake_quant(_features(x), _MEAN) @ constant(*_DENSE), _LOGITS)
    return jax.nn.softmax(logits)


def _simulate_features(x):
    kernel, window = jnp.asarray(_KERNEL[0]), jnp.asarray(_WINDOW[0])
    convolved = contractions.conv_2d(
        x, _X, kernel, _KERNEL[1], None, _CONV, padding="SAME", clamp=_RELU6
    )
    depthwise = contractions.conv_2d(
        convolved,
        _CONV,
        window,
        _WINDOW[1],
        None,
        _DEPTHWISE,
        padding="SAME",
        groups=8,
    )
    total = binary.add(convolved, _CONV, depthwise, _DEPTHWISE, _SUM)
    gate = unary.lookup(unary.logistic(_SUM, _GATE), total)
    product = binary.mul(total, _SUM, gate, _GATE, _PRODUCT)
    pooled = pooling.average_pool_2d(product, _PRODUCT, _PRODUCT, (2, 2), (2, 2))
    largest = pooling.max_pool_2d(total, _SUM, _SUM, (2, 2), (2, 2))
    joined = rescaling.concatenate([pooled, largest], [_PRODUCT, _SUM], _JOINED, -1)
    return reductions.mean(joined, _JOINED, _MEAN, (1, 2))


def _simulate_probabilities(x):
    mean, dense = _simulate_features(x), jnp.asarray(_DENSE[0])
    logits = contractions.fully_connected(mean, _MEAN, dense, _DENSE[1], None, _LOGITS)
    return softmax.softmax(logits, _LOGITS, _PROBABILITIES)


def test_equals_the_interpreter():
    # So many that a fused multiply-add in the mean would show.
    x = integers(_RNG, (512, 8, 8, 5))
    inputs = ((x, _X),)
    interpreter.check(
        {
            "features": Case(_features, inputs, _MEAN, _simulate_features),
            "probabilities": Case(
                _probabilities, inputs, _PROBABILITIES, _simulate_probabilities
            ),
        }
    )

"""Operators that follow one another in one model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from aqtlite.edge.arithmetic import (
    binary,
    contractions,
    reductions,
    rescaling,
    softmax,
    unary,
)
from aqtlite.edge.grid import Quantized
from aqtlite.edge.operators.reductions import MaxPool2D
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


def _constant(values, of):
    return Quantized(jnp.asarray(values), of)


def _simulate_features(x):
    convolved = Quantized(
        contractions.conv_2d(
            x, _constant(*_KERNEL), None, _CONV, padding="SAME", clamp=_RELU6
        ),
        _CONV,
    )
    depthwise = contractions.conv_2d(
        convolved, _constant(*_WINDOW), None, _DEPTHWISE, padding="SAME", groups=8
    )
    depthwise = Quantized(depthwise, _DEPTHWISE)
    total = Quantized(binary.add(convolved, depthwise, _SUM), _SUM)
    gate = unary.lookup(unary.logistic(_SUM, _GATE), total.qvalue)
    product = binary.mul(total, Quantized(gate, _GATE), _PRODUCT)
    pooled = reductions.average_pool_2d(product, (2, 2), (2, 2))
    largest = MaxPool2D((2, 2), (2, 2), "VALID").compute(total.qvalue)
    joined = [
        rescaling.rescale(Quantized(x, of), _JOINED)
        for x, of in ((pooled, _PRODUCT), (largest, _SUM))
    ]
    joined = Quantized(jnp.concatenate(joined, -1), _JOINED)
    return reductions.mean(joined, _MEAN, (1, 2))


def _simulate_probabilities(x):
    mean = Quantized(_simulate_features(x), _MEAN)
    logits = contractions.fully_connected(mean, _constant(*_DENSE), None, _LOGITS)
    return softmax.softmax(Quantized(logits, _LOGITS), _PROBABILITIES)


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

"""Activation functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.onnx.evaluation import Call, Value, is_static
from aqtlite.onnx.registry import operator

Function = Any

FUNCTIONS: dict[str, Function] = {
    "Affine": lambda x, alpha=1.0, beta=0.0: alpha * x + beta,
    "Celu": lambda x, alpha=1.0: jax.nn.celu(x, alpha),
    "Elu": lambda x, alpha=1.0: jax.nn.elu(x, alpha),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: jnp.minimum(
        jnp.maximum(alpha * x + beta, 0), 1
    ),
    "LeakyRelu": lambda x, alpha=0.01: jax.nn.leaky_relu(x, alpha),
    "Relu": lambda x: jax.nn.relu(x),
    "ScaledTanh": lambda x, alpha=1.0, beta=1.0: alpha * jnp.tanh(beta * x),
    "Selu": lambda x, alpha=1.6732632423543772, gamma=1.0507009873554805: (
        gamma * jax.nn.elu(x, alpha)
    ),
    "Sigmoid": lambda x: jax.nn.sigmoid(x),
    "Softplus": lambda x: jax.nn.softplus(x),
    "Softsign": lambda x: jax.nn.soft_sign(x),
    "Tanh": lambda x: jnp.tanh(x),
    "ThresholdedRelu": lambda x, alpha=1.0: jnp.where(x > alpha, x, 0),
}
"""Functions of a value, and numbers that are attributes of an ONNX operator."""


def _of_attributes(function: Function) -> Function:
    def apply(call: Call, x: Value) -> Value:
        x = jnp.asarray(x)
        return function(x, **call.node.attributes).astype(x.dtype)

    return apply


for _name, _function in FUNCTIONS.items():
    if _name not in ("Affine", "Relu", "ScaledTanh", "Tanh"):
        operator(_name)(_of_attributes(_function))


@operator("Relu")
def _relu(call: Call, x: Value) -> Value:
    return np.maximum(x, 0) if is_static(x) else jax.nn.relu(x)


@operator("Gelu")
def _gelu(call: Call, x: Value) -> Value:
    is_approximate = call.attribute("approximate", "none") == "tanh"
    return jax.nn.gelu(x, approximate=is_approximate)


@operator("HardSwish")
def _hard_swish(call: Call, x: Value) -> Value:
    return jax.nn.hard_swish(x)


@operator("Mish")
def _mish(call: Call, x: Value) -> Value:
    return jax.nn.mish(x)


@operator("Swish")
def _swish(call: Call, x: Value) -> Value:
    return x * jax.nn.sigmoid(call.attribute("alpha", 1.0) * x)


@operator("Shrink")
def _shrink(call: Call, x: Value) -> Value:
    bound, bias = call.attribute("lambd", 0.5), call.attribute("bias", 0.0)
    x = jnp.asarray(x)
    return jnp.where(x < -bound, x + bias, jnp.where(x > bound, x - bias, 0))


@operator("PRelu", weights=(1,))
def _prelu(call: Call, x: Value, slope: Value) -> Value:
    return jnp.where(x < 0, x * slope, x)


@operator("Softmax", "LogSoftmax", "Hardmax")
def _softmax(call: Call, x: Value) -> Value:
    if call.opset >= 13:
        return _along(call, x, call.attribute("axis", -1))
    # All axes from `axis` on are one.
    axis = call.attribute("axis", 1) % max(x.ndim, 1)
    if axis == x.ndim - 1:
        return _along(call, x, axis)
    rows = x.reshape(int(np.prod(x.shape[:axis])), -1)
    return _along(call, rows, 1).reshape(x.shape)


def _along(call: Call, x: Value, axis: int) -> Value:
    if call.node.op_type == "Softmax":
        return jax.nn.softmax(x, axis)
    if call.node.op_type == "LogSoftmax":
        return jax.nn.log_softmax(x, axis)
    largest = jnp.argmax(x, axis)
    return jax.nn.one_hot(largest, x.shape[axis], dtype=x.dtype, axis=axis)

"""Normalizations."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from aqtlite.onnx.evaluation import Call, Value
from aqtlite.onnx.operators.windows import halves
from aqtlite.onnx.registry import operator


def _of_channels(x: Value, like: Value) -> Value:
    return x.reshape(-1, *[1] * (like.ndim - 2))


@operator("BatchNormalization", weights=(1, 2, 3, 4))
def _batch(
    call: Call, x: Value, scale: Value, bias: Value, mean: Value, variance: Value
) -> Value:
    if call.attribute("training_mode", 0) or (call.opset < 14 and call.has_output(1)):
        raise call.unsupported(
            "it updates statistics as in training: export the network for inference"
        )
    # The factor and the offset depend on parameters alone.
    factor = scale * lax.rsqrt(jnp.asarray(variance + call.attribute("epsilon", 1e-5)))
    offset = bias - mean * factor
    factor, offset = factor.astype(x.dtype), offset.astype(x.dtype)
    return x * _of_channels(factor, x) + _of_channels(offset, x)


def _standardized(
    x: Value, axes: tuple[int, ...], epsilon: float
) -> tuple[Value, Value, Value]:
    """Returns standardized values, means, and reciprocal standard deviations."""
    mean = x.mean(axes, keepdims=True)
    centered = x - mean
    variance = (centered * centered).mean(axes, keepdims=True)
    deviation = lax.rsqrt(variance + epsilon)
    return centered * deviation, mean, deviation


@operator("LayerNormalization", weights=(1, 2))
def _layer(call: Call, x: Value, scale: Value, bias: Value = None) -> Any:
    axes = tuple(range(call.attribute("axis", -1) % x.ndim, x.ndim))
    dtype = jnp.float32 if call.attribute("stash_type", 1) == 1 else x.dtype
    wide = jnp.asarray(x, jnp.promote_types(dtype, x.dtype))
    y, mean, deviation = _standardized(wide, axes, call.attribute("epsilon", 1e-5))
    y = y.astype(x.dtype) * scale
    return y if bias is None else y + bias, mean, deviation


@operator("RMSNormalization", weights=(1,))
def _rms(call: Call, x: Value, scale: Value) -> Value:
    axes = tuple(range(call.attribute("axis", -1) % x.ndim, x.ndim))
    wide = jnp.asarray(x, jnp.promote_types(jnp.float32, x.dtype))
    square = (wide * wide).mean(axes, keepdims=True)
    y = wide * lax.rsqrt(square + call.attribute("epsilon", 1e-5))
    return y.astype(x.dtype) * scale


@operator("InstanceNormalization", weights=(1, 2))
def _instance(call: Call, x: Value, scale: Value, bias: Value) -> Value:
    axes = tuple(range(2, x.ndim))
    y, _, _ = _standardized(x, axes, call.attribute("epsilon", 1e-5))
    return y * _of_channels(scale, x) + _of_channels(bias, x)


@operator("GroupNormalization", weights=(1, 2))
def _group(call: Call, x: Value, scale: Value, bias: Value) -> Value:
    groups = call.attribute("num_groups")
    grouped = x.reshape(x.shape[0], groups, -1)
    y, _, _ = _standardized(grouped, (2,), call.attribute("epsilon", 1e-5))
    if call.opset < 21:  # A scale for each group.
        return (y * scale[:, None] + bias[:, None]).reshape(x.shape)
    return y.reshape(x.shape) * _of_channels(scale, x) + _of_channels(bias, x)


@operator("LpNormalization")
def _lp(call: Call, x: Value) -> Value:
    axis, p = call.attribute("axis", -1), call.attribute("p", 2)
    sums = (abs(x) if p == 1 else x * x).sum(axis, keepdims=True)
    sums = jnp.where(sums == 0, 1, sums)  # Zeros stay zeros.
    return x / (sums if p == 1 else jnp.sqrt(sums))


@operator("LRN")
def _lrn(call: Call, x: Value) -> Value:
    size = call.attribute("size")
    others = [1] * (x.ndim - 2)
    sums = lax.reduce_window(
        x * x,
        jnp.zeros((), x.dtype),
        lax.add,
        (1, size, *others),
        (1, 1, *others),
        ((0, 0), halves(size - 1, True), *[(0, 0)] * len(others)),
    )
    alpha, beta = call.attribute("alpha", 1e-4), call.attribute("beta", 0.75)
    return x / (call.attribute("bias", 1.0) + alpha / size * sums) ** beta

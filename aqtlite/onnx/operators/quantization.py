"""Quantized values of a file that was quantized before."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.onnx.evaluation import Call, Value, numpy_of
from aqtlite.onnx.operators.elementwise import dtype_of
from aqtlite.onnx.registry import operator


def _spread(call: Call, parameter: Value, x: Value) -> Value:
    """Scales or zero points, in a shape that broadcasts with an array."""
    axis, size = call.attribute("axis", 1), call.attribute("block_size", 0)
    if parameter.size == 1:
        return parameter.reshape(())
    if size:
        wide = numpy_of(parameter).repeat(parameter, size, axis=axis)
        return wide[(slice(None),) * (axis % x.ndim) + (slice(x.shape[axis]),)]
    shape = [1] * x.ndim
    shape[axis] = -1
    return parameter.reshape(shape)


@operator("QuantizeLinear", static=(1, 2))
def _quantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    dtype = np.dtype(np.uint8) if zero is None else zero.dtype
    if zero is None and call.attribute("output_dtype", 0):
        dtype = dtype_of(call, call.attribute("output_dtype"))
    ratio = jnp.asarray(x) / _spread(call, scale, x)
    if not np.issubdtype(dtype, np.integer) and "int" not in dtype.name:
        bound = float(jnp.finfo(dtype).max)
        return jnp.clip(ratio, -bound, bound).astype(dtype)
    offset = 0 if zero is None else _spread(call, zero, x).astype(np.float32)
    limits = jnp.iinfo(dtype)
    rounded = jnp.round(ratio) + offset
    return jnp.clip(rounded, int(limits.min), int(limits.max)).astype(dtype)


@operator("DequantizeLinear", static=(1, 2))
def _dequantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    wide = x.astype(np.float32)
    if zero is not None:
        wide = wide - _spread(call, zero, x).astype(np.float32)
    return (wide * _spread(call, scale, x)).astype(scale.dtype)


@operator("DynamicQuantizeLinear")
def _dynamic(call: Call, x: Value) -> Any:
    x = jnp.asarray(x)
    low, high = jnp.minimum(x.min(), 0), jnp.maximum(x.max(), 0)
    scale = (high - low) / 255
    safe = jnp.where(scale == 0, 1, scale)
    zero = jnp.clip(jnp.round(-low / safe), 0, 255)
    values = jnp.clip(jnp.round(x / safe) + zero, 0, 255)
    return values.astype(np.uint8), scale, zero.astype(np.uint8)

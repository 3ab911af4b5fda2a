"""Pooling over windows and over whole images."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.onnx.evaluation import Call, Value
from aqtlite.onnx.operators.windows import Window
from aqtlite.onnx.registry import operator

Pads = list[tuple[int, int]]


def _padding(call: Call, window: Window, spatial: tuple[int, ...]) -> tuple[Pads, Pads]:
    """Padding of the operator, and with what completes the last windows."""
    pads = window.pads(call, spatial)
    if call.attribute("ceil_mode", 0):
        return pads, window.ceiled(spatial, pads)
    return pads, pads


def _reduced(x: Value, window: Window, pads: Pads, initial: Any, function: Any) -> Any:
    return lax.reduce_window(
        x,
        np.asarray(initial, x.dtype),
        function,
        (1, 1, *window.sizes),
        (1, 1, *window.strides),
        ((0, 0), (0, 0), *pads),
        window_dilation=(1, 1, *window.dilations),
    )


@operator("MaxPool")
def _max_pool(call: Call, x: Value) -> Value:
    if call.has_output(1):
        raise call.unsupported("the places of maxima, its second output")
    x = jnp.asarray(x)
    window = Window.of(call, call.attribute("kernel_shape"))
    _, pads = _padding(call, window, x.shape[2:])
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    lowest = -np.inf if is_float else jnp.iinfo(x.dtype).min
    return _reduced(x, window, pads, lowest, lax.max)


@operator("AveragePool")
def _average_pool(call: Call, x: Value) -> Value:
    x = jnp.asarray(x)
    window = Window.of(call, call.attribute("kernel_shape"))
    inside, pads = _padding(call, window, x.shape[2:])
    if not call.attribute("count_include_pad", 0):
        inside = [(0, 0)] * len(inside)
    sums = _reduced(x, window, pads, 0, lax.add)
    counts = window.counts(x.shape[2:], pads, inside)
    if (counts == counts.flat[0]).all():
        return sums / counts.flat[0].astype(x.dtype)
    return sums / counts.astype(x.dtype)


@operator("LpPool")
def _lp_pool(call: Call, x: Value) -> Value:
    x = jnp.asarray(x)
    window = Window.of(call, call.attribute("kernel_shape"))
    _, pads = _padding(call, window, x.shape[2:])
    p = call.attribute("p", 2)
    return _reduced(abs(x) ** p, window, pads, 0, lax.add) ** (1 / p)


@operator("GlobalAveragePool")
def _global_average_pool(call: Call, x: Value) -> Value:
    return x.mean(tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalMaxPool")
def _global_max_pool(call: Call, x: Value) -> Value:
    return x.max(tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalLpPool")
def _global_lp_pool(call: Call, x: Value) -> Value:
    p = call.attribute("p", 2)
    return (abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)

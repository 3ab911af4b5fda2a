"""Sums, means, extrema along axes."""

from typing import Any

import jax.numpy as jnp
import jax.scipy.special

from aqtlite.onnx.evaluation import Call, Value, numpy_of
from aqtlite.onnx.operators.layout import axes_of
from aqtlite.onnx.registry import operator

_FUNCTIONS: dict[str, Any] = {
    "ReduceSum": lambda numpy, x, **axes: numpy.sum(x, dtype=x.dtype, **axes),
    "ReduceProd": lambda numpy, x, **axes: numpy.prod(x, dtype=x.dtype, **axes),
    "ReduceMean": lambda numpy, x, **axes: numpy.mean(x, **axes).astype(x.dtype),
    "ReduceMax": lambda numpy, x, **axes: numpy.max(x, **axes, **_of_none(x, -1)),
    "ReduceMin": lambda numpy, x, **axes: numpy.min(x, **axes, **_of_none(x, 1)),
    "ReduceL1": lambda numpy, x, **axes: numpy.sum(abs(x), dtype=x.dtype, **axes),
    "ReduceL2": lambda numpy, x, **axes: numpy.sqrt(numpy.sum(x * x, **axes)).astype(
        x.dtype
    ),
    "ReduceSumSquare": lambda numpy, x, **axes: numpy.sum(x * x, dtype=x.dtype, **axes),
    "ReduceLogSum": lambda numpy, x, **axes: numpy.log(numpy.sum(x, **axes)),
    "ReduceLogSumExp": lambda numpy, x, **axes: jax.scipy.special.logsumexp(x, **axes),
}


def _of_none(x: Value, sign: int) -> dict[str, Any]:
    """What an extremum of no elements is, if there are none."""
    return {} if x.size else {"initial": sign * jnp.inf}


@operator(*_FUNCTIONS)
def _reduce(call: Call, x: Value, axes: Value = None) -> Value:
    function = _FUNCTIONS[call.node.op_type]
    places = axes_of(call, axes) or None
    if places is None and call.attribute("noop_with_empty_axes", 0):
        places = ()
    keepdims = bool(call.attribute("keepdims", 1))
    numpy = numpy_of(x)
    return function(numpy, x, axis=places, keepdims=keepdims)


@operator("MeanVarianceNormalization")
def _mean_variance(call: Call, x: Value) -> Value:
    axes = tuple(call.attribute("axes", (0, 2, 3)))
    x = jnp.asarray(x)
    centered = x - x.mean(axes, keepdims=True)
    return centered / (x.std(axes, keepdims=True) + 1e-9)

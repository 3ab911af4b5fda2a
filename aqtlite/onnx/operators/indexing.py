"""Gathering, scattering, sorting, counting."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.onnx.evaluation import Call, Value, numpy_of
from aqtlite.onnx.registry import operator


def _along(indices: Value, axis: int) -> tuple[Value, ...]:
    """Index of an array that takes `indices` along an axis, the others in place."""
    grids = np.ogrid[tuple(slice(size) for size in indices.shape)]
    places: list[Value] = list(grids)
    places[axis] = indices
    return tuple(places)


def _not_negative(indices: Value, size: int) -> Value:
    """Counts negative indices from the end."""
    numpy = numpy_of(indices)
    return numpy.where(indices < 0, indices + np.asarray(size, indices.dtype), indices)


@operator("Gather")
def _gather(call: Call, x: Value, indices: Value) -> Value:
    axis = call.attribute("axis", 0)
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        return x[(slice(None),) * (axis % x.ndim) + (int(indices),)]
    indices = _not_negative(indices, x.shape[axis])
    if numpy_of(x, indices) is np:
        return np.take(x, indices, axis)
    return jnp.take(jnp.asarray(x), indices, axis, mode="clip")


@operator("GatherElements")
def _gather_elements(call: Call, x: Value, indices: Value) -> Value:
    axis = call.attribute("axis", 0)
    indices = _not_negative(indices, x.shape[axis])
    if numpy_of(x, indices) is np:
        return x[_along(indices, axis)]
    return jnp.asarray(x)[_along(indices, axis)]


@operator("GatherND")
def _gather_nd(call: Call, x: Value, indices: Value) -> Value:
    x = x if numpy_of(x, indices) is np else jnp.asarray(x)
    return x[_of_tuples(indices, call.attribute("batch_dims", 0))]


def _of_tuples(indices: Value, batch_axes: int) -> tuple[Value, ...]:
    """Index of an array from tuples of places along the last axis of `indices`."""
    shape = indices.shape[:-1]
    grids = np.ogrid[tuple(slice(size) for size in shape)]
    tuples = tuple(indices[..., i] for i in range(indices.shape[-1]))
    return (*grids[:batch_axes], *tuples)


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call, x: Value, indices: Value, updates: Value) -> Value:
    axis = call.attribute("axis", 0)
    indices = _not_negative(indices, x.shape[axis])
    return _updated(call, x, _along(indices, axis), updates)


@operator("ScatterND")
def _scatter_nd(call: Call, x: Value, indices: Value, updates: Value) -> Value:
    return _updated(call, x, _of_tuples(indices, 0), updates)


def _updated(call: Call, x: Value, place: tuple[Value, ...], updates: Value) -> Value:
    reduction = call.attribute("reduction", "none")
    if reduction == "none" and numpy_of(x, updates, *place) is np:
        result = x.copy()
        result[place] = updates
        return result
    target = jnp.asarray(x).at[place]
    functions: dict[str, Any] = {
        "none": target.set,
        "add": target.add,
        "mul": target.multiply,
        "max": target.max,
        "min": target.min,
    }
    return functions[reduction](updates)


@operator("Compress")
def _compress(call: Call, x: Value, condition: Value) -> Value:
    is_taken = call.static(condition, "condition")
    axis = call.attribute("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    return numpy_of(x).take(x, np.flatnonzero(is_taken), axis=axis)


@operator("ArgMax", "ArgMin")
def _arg_extremum(call: Call, x: Value) -> Value:
    axis = call.attribute("axis", 0) % x.ndim
    numpy, size = numpy_of(x), x.shape[axis]
    function = numpy.argmax if call.node.op_type == "ArgMax" else numpy.argmin
    if call.attribute("select_last_index", 0):
        index = size - 1 - function(numpy.flip(x, axis), axis=axis)
    else:
        index = function(x, axis=axis)
    return numpy.expand_dims(index, axis) if call.attribute("keepdims", 1) else index


@operator("TopK")
def _top_k(call: Call, x: Value, k: Value = None) -> Any:
    axis = call.attribute("axis", -1) % x.ndim
    count = call.attribute("k")
    count = count if k is None else call.integers(k, "k")[0]
    moved = jnp.moveaxis(jnp.asarray(x), axis, -1)
    if call.attribute("largest", 1):
        values, indices = lax.top_k(moved, count)
    else:
        indices = jnp.argsort(moved, axis=-1, stable=True)[..., :count]
        values = jnp.take_along_axis(moved, indices, -1)
    indices = indices.astype(jax.dtypes.canonicalize_dtype(np.int64))
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


@operator("CumSum", "CumProd")
def _cumulative(call: Call, x: Value, axis: Value) -> Value:
    (place,) = call.integers(axis, "axis")
    numpy = numpy_of(x)
    is_sum = call.node.op_type == "CumSum"
    is_reverse = call.attribute("reverse", 0)
    x = numpy.flip(x, place) if is_reverse else x
    result = (numpy.cumsum if is_sum else numpy.cumprod)(x, axis=place, dtype=x.dtype)
    if call.attribute("exclusive", 0):
        widths = [(0, 0)] * x.ndim
        widths[place] = (1, 0)
        shifted = numpy.pad(result, widths, constant_values=0 if is_sum else 1)
        result = numpy.take(shifted, np.arange(x.shape[place]), axis=place)
    return numpy.flip(result, place) if is_reverse else result


@operator("ReverseSequence")
def _reverse_sequence(call: Call, x: Value, lengths: Value) -> Value:
    time, batch = call.attribute("time_axis", 0), call.attribute("batch_axis", 1)
    moved = jnp.moveaxis(jnp.asarray(x), (time, batch), (0, 1))
    place = reversed_places(lengths, moved.shape[0])
    reversed_ = moved[place, np.arange(moved.shape[1])]
    return jnp.moveaxis(reversed_, (0, 1), (time, batch))


def reversed_places(lengths: Value, size: int) -> Value:
    """Indices (size, batch) that reverse the first elements of sequences."""
    steps = np.arange(size, dtype=np.int32)[:, None]
    return jnp.where(steps < lengths, lengths - 1 - steps, steps)

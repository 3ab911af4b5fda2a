"""Operators that move elements."""

import dataclasses

import numpy as np

from aqtlite.edge.onnx.forms.base import Call, Form, number
from aqtlite.edge.onnx.writer import Array, stored_grid
from aqtlite.edge.operators import layout
from aqtlite.edge.operators.base import Operator


def _moved(call: Call, operator: str, *more: str) -> Array:
    """An operator of one array, whose grid the output has."""
    (x,) = call.inputs
    return call.writer.apply(operator, [x], call.shape, x.grid, call.name, *more)


def _reshape(call: Call, operator: layout.Reshape) -> Array:
    return call.writer.reshape(call.inputs[0], operator.shape, call.name)


def _transpose(call: Call, operator: layout.Transpose) -> Array:
    return call.writer.transpose(call.inputs[0], operator.permutation, call.name)


def _broadcast_to(call: Call, operator: layout.BroadcastTo) -> Array:
    return _moved(call, "Expand", call.writer.indices(operator.shape))


def _slice(call: Call, operator: layout.Slice) -> Array:
    axes = range(len(operator.start))
    bounds = operator.start, operator.limit, axes, operator.strides
    return _moved(call, "Slice", *map(call.writer.indices, bounds))


def _pad(call: Call, operator: layout.Pad) -> Array:
    """Pads with the zero point, since onnxruntime pads values in float."""
    (x,), writer = call.inputs, call.writer
    pairs = operator.widths
    widths = writer.indices([low for low, _ in pairs] + [high for _, high in pairs])
    if x.grid is None or stored_grid(x.grid)[0] != "uint8":
        return _moved(call, "Pad", widths, number(writer, 0, x.dtype))
    dtype, zero_point = stored_grid(x.grid)
    zero = writer.initializer(zero_point, dtype, "zero_point")
    made = writer.node("Pad", [x.name, widths, zero], call.name)
    return dataclasses.replace(x, name=made, shape=call.shape)


def _concatenate(call: Call, operator: layout.Concatenate) -> Array:
    return call.write("Concat", call.inputs, axis=operator.axis)


def _take(call: Call, operator: layout.Take) -> Array:
    (x, indices), writer, axis = call.inputs, call.writer, operator.axis
    size = x.shape[axis]
    if indices.known is not None:
        known = np.clip(indices.known.astype(np.int64), 0, size - 1)
        indices = writer.constant(known, "indices")
    else:
        if indices.dtype not in (np.int32, np.int64):
            indices = writer.cast(indices, np.int64, f"{call.name}/indices")
        # ONNX counts negative indices from the end, and refuses ones beyond it.
        ends = [number(writer, end, indices.dtype) for end in (0, size - 1)]
        name = f"{call.name}/inside"
        indices = writer.apply("Clip", [indices], indices.shape, None, name, *ends)
    more = indices.name
    return writer.apply("Gather", [x], call.shape, x.grid, call.name, more, axis=axis)


FORMS: dict[type[Operator], Form] = {
    layout.BroadcastTo: _broadcast_to,
    layout.Concatenate: _concatenate,
    layout.Pad: _pad,
    layout.Reshape: _reshape,
    layout.Slice: _slice,
    layout.Take: _take,
    layout.Transpose: _transpose,
}

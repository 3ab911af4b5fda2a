"""Operators that move elements."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from aqtlite.edge.onnx.forms.base import Form, Output, number, plain
from aqtlite.edge.onnx.writer import Array, Writer, stored_grid
from aqtlite.edge.operators import layout
from aqtlite.edge.operators.base import Operator


def _reshape(
    writer: Writer, operator: layout.Reshape, inputs: Sequence[Array], output: Output
) -> Array:
    (x,) = inputs
    return writer.reshape(x, operator.shape, output.name)


def _transpose(
    writer: Writer, operator: layout.Transpose, inputs: Sequence[Array], output: Output
) -> Array:
    (x,) = inputs
    return writer.transpose(x, operator.permutation, output.name)


def _broadcast_to(
    writer: Writer,
    operator: layout.BroadcastTo,
    inputs: Sequence[Array],
    output: Output,
) -> Array:
    (x,) = inputs
    shape = writer.indices(operator.shape)
    return writer.apply("Expand", [x], operator.shape, x.grid, output.name, shape)


def _slice(
    writer: Writer, operator: layout.Slice, inputs: Sequence[Array], output: Output
) -> Array:
    (x,) = inputs
    bounds = [
        writer.indices(values)
        for values in (
            operator.start,
            operator.limit,
            range(len(x.shape)),
            operator.strides,
        )
    ]
    return writer.apply("Slice", [x], output.shape, x.grid, output.name, *bounds)


def _pad(
    writer: Writer, operator: layout.Pad, inputs: Sequence[Array], output: Output
) -> Array:
    """Pads with the zero point, since onnxruntime pads values in float."""
    (x,) = inputs
    pairs = operator.widths
    widths = writer.indices([low for low, _ in pairs] + [high for _, high in pairs])
    if x.grid is None or stored_grid(x.grid)[0] != "uint8":
        zero = number(writer, 0, x.dtype)
        return writer.apply("Pad", [x], output.shape, x.grid, output.name, widths, zero)
    dtype, zero_point = stored_grid(x.grid)
    zero = writer.initializer(zero_point, dtype, "zero_point")
    made = writer.node("Pad", [x.name, widths, zero], output.name)
    return dataclasses.replace(x, name=made, shape=output.shape)


def _concatenate(
    writer: Writer,
    operator: layout.Concatenate,
    inputs: Sequence[Array],
    output: Output,
) -> Array:
    form = plain("Concat", axis=operator.axis)
    return form(writer, operator, inputs, output)


def _take(
    writer: Writer, operator: layout.Take, inputs: Sequence[Array], output: Output
) -> Array:
    x, indices = inputs
    size = x.shape[operator.axis]
    if indices.known is not None:
        known = np.clip(indices.known.astype(np.int64), 0, size - 1)
        indices = writer.constant(known, "indices")
    else:
        if indices.dtype not in (np.int32, np.int64):
            indices = writer.cast(indices, np.int64, f"{output.name}/indices")
        # ONNX counts negative indices from the end, and refuses ones beyond it.
        ends = [number(writer, end, indices.dtype) for end in (0, size - 1)]
        name = f"{output.name}/inside"
        indices = writer.apply("Clip", [indices], indices.shape, None, name, *ends)
    return writer.apply(
        "Gather",
        [x],
        output.shape,
        x.grid,
        output.name,
        indices.name,
        axis=operator.axis,
    )


FORMS: dict[type[Operator], Form] = {
    layout.BroadcastTo: _broadcast_to,
    layout.Concatenate: _concatenate,
    layout.Pad: _pad,
    layout.Reshape: _reshape,
    layout.Slice: _slice,
    layout.Take: _take,
    layout.Transpose: _transpose,
}

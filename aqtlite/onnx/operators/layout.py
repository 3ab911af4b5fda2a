"""Shapes, transpositions, slices, padding: elements move, none is computed."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.onnx.evaluation import Call, Value, is_static, numpy_of
from aqtlite.onnx.registry import operator

_LAST = np.iinfo(np.int64).max


def axes_of(call: Call, given: Value) -> tuple[int, ...] | None:
    """Returns axes from an input, or the attribute of older versions."""
    if given is not None:
        return call.integers(given, "axes")
    axes = call.attribute("axes")
    return None if axes is None else tuple(axes)


@operator("Reshape")
def _reshape(call: Call, x: Value, shape: Value) -> Value:
    sizes = list(call.integers(shape, "shape"))
    if not call.attribute("allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def _flatten(call: Call, x: Value) -> Value:
    axis = call.attribute("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    rows, columns = np.prod(x.shape[:axis]), np.prod(x.shape[axis:])
    return x.reshape(int(rows), int(columns))


@operator("Squeeze")
def _squeeze(call: Call, x: Value, axes: Value = None) -> Value:
    return numpy_of(x).squeeze(x, axes_of(call, axes))


@operator("Unsqueeze")
def _unsqueeze(call: Call, x: Value, axes: Value = None) -> Value:
    return numpy_of(x).expand_dims(x, axes_of(call, axes) or ())


@operator("Transpose")
def _transpose(call: Call, x: Value) -> Value:
    return x.transpose(call.attribute("perm", tuple(range(x.ndim))[::-1]))


@operator("Concat")
def _concat(call: Call, *values: Value) -> Value:
    if not all(map(is_static, values)):
        values = tuple(map(jnp.asarray, values))
    return numpy_of(*values).concatenate(values, axis=call.attribute("axis"))


@operator("Split")
def _split(call: Call, x: Value, sizes: Value = None) -> Any:
    axis = call.attribute("axis", 0)
    parts = call.attribute("split")
    if sizes is not None:
        parts = call.integers(sizes, "sizes")
    if parts is None:
        count = call.attribute("num_outputs", len(call.node.outputs))
        part = -(-x.shape[axis] // count)
        parts = [part] * (count - 1) + [x.shape[axis] - part * (count - 1)]
    places = [int(place) for place in np.cumsum(parts)[:-1]]
    return tuple(numpy_of(x).split(x, places, axis=axis))


@operator("Slice")
def _slice(
    call: Call,
    x: Value,
    starts: Value = None,
    ends: Value = None,
    axes: Value = None,
    steps: Value = None,
) -> Value:
    if starts is None:
        first, last = call.attribute("starts"), call.attribute("ends")
    else:
        first, last = call.integers(starts, "starts"), call.integers(ends, "ends")
    places = axes_of(call, axes) or range(len(first))
    strides = [1] * len(first) if steps is None else call.integers(steps, "steps")
    slices = [slice(None)] * x.ndim
    for axis, start, stop, step in zip(places, first, last, strides, strict=True):
        slices[axis] = _python_slice(start, stop, step, x.shape[axis])
    return x[tuple(slices)]


def _python_slice(start: int, stop: int, step: int, size: int) -> slice:
    """Slice of Python: both limits are clamped, and -1 ends one that goes down."""
    lowest, highest = (0, size) if step > 0 else (-1, size - 1)
    start = start + size if start < 0 else start
    stop = stop + size if stop < 0 else stop
    start = min(max(start, max(lowest, 0)), highest)
    stop = min(max(stop, lowest), highest)
    return slice(start, None if stop < 0 else stop, step)


@operator("Expand")
def _expand(call: Call, x: Value, shape: Value) -> Value:
    sizes = np.broadcast_shapes(x.shape, call.integers(shape, "shape"))
    return numpy_of(x).broadcast_to(x, sizes)


@operator("Tile")
def _tile(call: Call, x: Value, repeats: Value) -> Value:
    counts = call.integers(repeats, "repeats")
    if min(counts, default=0) < 0:
        raise call.unsupported(f"its repeats {counts} are negative")
    return numpy_of(x).tile(x, counts)


@operator("Pad")
def _pad(
    call: Call, x: Value, pads: Value = None, value: Value = None, axes: Value = None
) -> Value:
    widths = call.attribute("pads")
    widths = widths if pads is None else call.integers(pads, "pads")
    places = axes_of(call, axes) if axes is not None else tuple(range(x.ndim))
    full = [(0, 0)] * x.ndim
    for i, axis in enumerate(places or ()):
        full[axis] = (widths[i], widths[i + len(widths) // 2])
    # Negative widths crop.
    cropped = tuple(
        slice(max(-low, 0), size - max(-high, 0))
        for (low, high), size in zip(full, x.shape, strict=True)
    )
    x = x[cropped] if any(min(pair) < 0 for pair in full) else x
    full = [(max(low, 0), max(high, 0)) for low, high in full]
    mode, numpy = call.attribute("mode", "constant"), numpy_of(x, value)
    if mode != "constant":
        return numpy.pad(x, full, mode=mode)
    value = call.attribute("value", 0.0) if value is None else value.reshape(())
    return numpy.pad(x, full, constant_values=numpy.asarray(value, x.dtype))


@operator("DepthToSpace")
def _depth_to_space(call: Call, x: Value) -> Value:
    block = call.attribute("blocksize")
    batch, depth, height, width = x.shape
    if call.attribute("mode", "DCR") == "DCR":
        x = x.reshape(batch, block, block, depth // block**2, height, width)
        x = x.transpose(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(batch, depth // block**2, block, block, height, width)
        x = x.transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, depth // block**2, height * block, width * block)


@operator("SpaceToDepth")
def _space_to_depth(call: Call, x: Value) -> Value:
    block = call.attribute("blocksize")
    batch, depth, height, width = x.shape
    x = x.reshape(batch, depth, height // block, block, width // block, block)
    is_depth_last = call.attribute("mode", "DCR") == "DCR"
    x = x.transpose((0, 3, 5, 1, 2, 4) if is_depth_last else (0, 1, 3, 5, 2, 4))
    return x.reshape(batch, depth * block**2, height // block, width // block)

"""Arrays of shapes, ranges and constants, and operators without arithmetic."""

from typing import Any

import numpy as np

from aqtlite.onnx.evaluation import Call, Value, numpy_of
from aqtlite.onnx.operators.elementwise import dtype_of
from aqtlite.onnx.registry import operator


@operator("Shape")
def _shape(call: Call, x: Value) -> Value:
    stop = call.attribute("end", x.ndim)
    return np.asarray(x.shape[call.attribute("start", 0) : stop], np.int64)


@operator("Size")
def _size(call: Call, x: Value) -> Value:
    return np.asarray(x.size, np.int64)


@operator("Identity")
def _identity(call: Call, x: Value) -> Value:
    return x


@operator("Dropout")
def _dropout(
    call: Call, x: Value, ratio: Value = None, training_mode: Value = None
) -> Any:
    if training_mode is not None and call.static(training_mode, "training mode").any():
        raise call.unsupported(
            "dropout in training needs random bits: export the network for inference"
        )
    mask = np.ones(x.shape, bool if call.opset >= 12 else x.dtype)
    return x, mask


@operator("ConstantOfShape")
def _constant_of_shape(call: Call, shape: Value) -> Value:
    value = call.attribute("value", np.zeros(1, np.float32))
    return np.full(call.integers(shape, "shape"), value.reshape(()), value.dtype)


@operator("Range", static=(0, 1, 2))
def _range(call: Call, start: Value, limit: Value, delta: Value) -> Value:
    numbers = [call.static(x, "limits").reshape(()) for x in (start, limit, delta)]
    count = max(int(np.ceil((numbers[1] - numbers[0]) / numbers[2])), 0)
    steps = np.arange(count).astype(start.dtype)
    return (numbers[0] + steps * numbers[2]).astype(start.dtype)


@operator("EyeLike")
def _eye_like(call: Call, x: Value) -> Value:
    number = call.attribute("dtype")
    dtype = x.dtype if number is None else dtype_of(call, number)
    rows, columns = x.shape
    return np.eye(rows, columns, call.attribute("k", 0)).astype(dtype)


@operator("OneHot", static=(1,))
def _one_hot(call: Call, indices: Value, depth: Value, values: Value) -> Value:
    (size,) = call.integers(depth, "depth")
    axis = call.attribute("axis", -1)
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    numpy = numpy_of(indices)
    shape = [1] * (indices.ndim + 1)
    shape[axis] = size
    classes = np.arange(size, dtype=np.int32).reshape(shape)
    wrapped = numpy.mod(indices, np.asarray(size, indices.dtype))
    in_range = (indices >= -size) & (indices < size)
    is_hit = numpy.expand_dims(wrapped, axis) == classes
    is_hit &= numpy.expand_dims(in_range, axis)
    return numpy_of(is_hit, values).where(is_hit, values[1], values[0])


@operator("NonZero")
def _non_zero(call: Call, x: Value) -> Value:
    return np.stack(np.nonzero(call.static(x, "input, which decides about a shape")))


@operator("Trilu")
def _trilu(call: Call, x: Value, diagonal: Value = None) -> Value:
    k = 0 if diagonal is None else call.integer(diagonal, "diagonal")
    numpy = numpy_of(x)
    return (numpy.triu if call.attribute("upper", 1) else numpy.tril)(x, k)

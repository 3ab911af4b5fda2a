"""Sequences of arrays, which are tuples in tracing."""

import numpy as np

from aqtlite.onnx.evaluation import Call, Value, numpy_of
from aqtlite.onnx.registry import operator

Sequence = tuple[Value, ...]


@operator("SequenceConstruct")
def _sequence(call: Call, *values: Value) -> tuple[Sequence]:
    return (tuple(values),)


@operator("SequenceEmpty")
def _empty(call: Call) -> tuple[Sequence]:
    return ((),)


@operator("SequenceInsert")
def _insert(
    call: Call, values: Sequence, value: Value, position: Value = None
) -> tuple[Sequence]:
    place = len(values) if position is None else call.integer(position, "position")
    items = list(values)
    items.insert(place, value)
    return (tuple(items),)


@operator("SequenceErase")
def _erase(call: Call, values: Sequence, position: Value = None) -> tuple[Sequence]:
    items = list(values)
    del items[-1 if position is None else call.integer(position, "position")]
    return (tuple(items),)


@operator("SequenceAt")
def _at(call: Call, values: Sequence, position: Value) -> Value:
    return values[call.integer(position, "position")]


@operator("SequenceLength")
def _length(call: Call, values: Sequence) -> Value:
    return np.asarray(len(values), np.int64)


@operator("ConcatFromSequence")
def _concat(call: Call, values: Sequence) -> Value:
    numpy = numpy_of(*values)
    join = numpy.stack if call.attribute("new_axis", 0) else numpy.concatenate
    return join(values, axis=call.attribute("axis"))


@operator("SplitToSequence")
def _split_to_sequence(call: Call, x: Value, sizes: Value = None) -> tuple[Sequence]:
    axis = call.attribute("axis", 0)
    size, numpy = x.shape[axis], numpy_of(x)
    if sizes is None:
        parts = numpy.split(x, size, axis=axis)
        if not call.attribute("keepdims", 1):
            parts = [numpy.squeeze(part, axis) for part in parts]
        return (tuple(parts),)
    counts = call.integers(sizes, "sizes")
    places = np.cumsum(counts)[:-1] if sizes.ndim else range(counts[0], size, counts[0])
    return (tuple(numpy.split(x, [int(place) for place in places], axis=axis)),)

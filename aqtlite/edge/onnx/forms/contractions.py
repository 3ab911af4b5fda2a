"""Matrix products, and reductions, some of which are written as such."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx.forms.base import Call, Form, plain
from aqtlite.edge.onnx.writer import Array, Writer
from aqtlite.edge.operators import contractions, reductions
from aqtlite.edge.operators.base import Operator


def _fully_connected(call: Call, _: Any) -> Array:
    (x, *rest), writer, name = call.inputs, call.writer, call.name
    if call.grid is None:
        # onnxruntime makes integers of the float weight of a Gemm.
        y = writer.apply("MatMul", [x, rest[0]], call.shape, None, f"{name}/product")
        for bias in rest[1:]:
            y = writer.apply("Add", [y, bias], y.shape, None, name)
        return y
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    x = writer.reshape(x, rows, f"{name}/rows")
    y = writer.apply("Gemm", [x, *rest], (rows[0], call.shape[-1]), call.grid, name)
    return writer.reshape(y, call.shape, f"{name}/reshaped")


def _mean(call: Call, operator: reductions.Mean) -> Array:
    """A pooling over all of an image of one column, which has an integer form."""
    if call.grid is None:
        return _reduce("ReduceMean")(call, operator)
    writer, name = call.writer, call.name
    x = _rows(writer, call.inputs[0], operator.axes, name)
    x = writer.reshape(x, (1, *x.shape, 1), f"{name}/image")
    y = writer.apply("GlobalAveragePool", [x], (1, x.shape[1], 1, 1), call.grid, name)
    return writer.reshape(y, call.shape, f"{name}/reshaped")


def _sum(call: Call, operator: reductions.Sum) -> Array:
    """A product with ones, which has an integer form."""
    if call.grid is None:
        return _reduce("ReduceSum")(call, operator)
    writer, name = call.writer, call.name
    x = _rows(writer, call.inputs[0], operator.axes, name)
    # A grid with an axis is one of int8, as weights have.
    grid = Grid(np.ones(1, np.float32), axis=1)
    ones = writer.stored(np.ones((x.shape[1], 1)), grid, "ones")
    y = writer.apply("Gemm", [x, ones], (x.shape[0], 1), call.grid, name)
    return writer.reshape(y, call.shape, f"{name}/reshaped")


def _rows(writer: Writer, x: Array, axes: Sequence[int], name: str) -> Array:
    """An array of two axes, of which the last one is made of some of x."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    x = writer.transpose(x, [*kept, *axes], f"{name}/moved")
    count = math.prod(x.shape[: len(kept)])
    return writer.reshape(x, (count, x.size // count), f"{name}/rows")


def _reduce(name: str) -> Form:
    def form(call: Call, operator: Any) -> Array:
        axes = call.writer.indices(operator.axes)
        return call.write(name, call.inputs, axes, keepdims=0)

    return form


FORMS: dict[type[Operator], Form] = {
    contractions.BatchMatMul: plain("MatMul"),
    contractions.FullyConnected: _fully_connected,
    reductions.Mean: _mean,
    reductions.ReduceMax: _reduce("ReduceMax"),
    reductions.ReduceMin: _reduce("ReduceMin"),
    reductions.Sum: _sum,
}

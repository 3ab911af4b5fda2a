"""Matrix products, and the reductions that are some."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx.forms.base import Form, Output, plain
from aqtlite.edge.onnx.writer import Array, Writer
from aqtlite.edge.operators import contractions, reductions
from aqtlite.edge.operators.base import Operator


def _fully_connected(
    writer: Writer, _: Any, inputs: Sequence[Array], output: Output
) -> Array:
    x, *rest = inputs
    if output.grid is None:
        # onnxruntime makes integers of the float weight of a Gemm.
        y = writer.apply(
            "MatMul", [x, rest[0]], output.shape, None, f"{output.name}/product"
        )
        for bias in rest[1:]:
            y = writer.apply("Add", [y, bias], y.shape, None, output.name)
        return y
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    x = writer.reshape(x, rows, f"{output.name}/rows")
    flat = (rows[0], output.shape[-1])
    y = writer.apply("Gemm", [x, *rest], flat, output.grid, output.name)
    return writer.reshape(y, output.shape, f"{output.name}/reshaped")


def _mean(
    writer: Writer, operator: reductions.Mean, inputs: Sequence[Array], output: Output
) -> Array:
    """A pooling over all of an image of one column, which has an integer form."""
    (x,) = inputs
    if output.grid is None:
        axes = writer.indices(operator.axes)
        return writer.apply(
            "ReduceMean", [x], output.shape, None, output.name, axes, keepdims=0
        )
    x = _rows(writer, x, operator.axes, output.name)
    x = writer.reshape(x, (1, *x.shape, 1), f"{output.name}/image")
    y = writer.apply(
        "GlobalAveragePool", [x], (1, x.shape[1], 1, 1), output.grid, output.name
    )
    return writer.reshape(y, output.shape, f"{output.name}/reshaped")


def _sum(
    writer: Writer, operator: reductions.Sum, inputs: Sequence[Array], output: Output
) -> Array:
    """A product with ones, which has an integer form."""
    (x,) = inputs
    if output.grid is None:
        axes = writer.indices(operator.axes)
        return writer.apply(
            "ReduceSum", [x], output.shape, None, output.name, axes, keepdims=0
        )
    x = _rows(writer, x, operator.axes, output.name)
    # A grid with an axis is one of int8, as weights have.
    grid = Grid(np.ones(1, np.float32), axis=1)
    ones = writer.stored(np.ones((x.shape[1], 1)), grid, "ones")
    y = writer.apply("Gemm", [x, ones], (x.shape[0], 1), output.grid, output.name)
    return writer.reshape(y, output.shape, f"{output.name}/reshaped")


def _rows(writer: Writer, x: Array, axes: Sequence[int], name: str) -> Array:
    """An array of two axes, of which the last one is made of some of x."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    x = writer.transpose(x, [*kept, *axes], f"{name}/moved")
    count = math.prod(x.shape[: len(kept)])
    return writer.reshape(x, (count, x.size // count), f"{name}/rows")


def _reduce(name: str) -> Form:
    def form(
        writer: Writer, operator: Any, inputs: Sequence[Array], output: Output
    ) -> Array:
        axes = writer.indices(operator.axes)
        return writer.apply(
            name, inputs, output.shape, output.grid, output.name, axes, keepdims=0
        )

    return form


FORMS: dict[type[Operator], Form] = {
    contractions.BatchMatMul: plain("MatMul"),
    contractions.FullyConnected: _fully_connected,
    reductions.Mean: _mean,
    reductions.ReduceMax: _reduce("ReduceMax"),
    reductions.ReduceMin: _reduce("ReduceMin"),
    reductions.Sum: _sum,
}

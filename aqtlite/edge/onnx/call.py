"""Calls of operators, and helpers to write them to an ONNX graph."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.onnx.writer import Array, Writer, stored_grid


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator or an equation, applied to arrays of a graph."""

    writer: Writer
    inputs: Sequence[Array]
    shape: tuple[int, ...]
    """Shape of the output."""

    dtype: Any
    """Dtype of the output's values: float32 if it has a grid."""

    name: str
    """Name of the output."""

    grid: Grid | None = None
    """Grid of the output; None if it is not quantized."""

    weight: Quantized | None = None
    """Frozen weight in place of the second input, of an operator in float."""

    is_dynamic: bool = False
    """Whether the first input is quantized by its own range at each call."""

    def write(
        self, operator: str, inputs: Sequence[Array], *more: str, **attributes: Any
    ) -> Array:
        """Adds an ONNX operator with the shape, grid and name of the call's output.

        Args:
            operator: name of the operator in ONNX.
            inputs: first inputs.
            *more: names of further inputs.
            **attributes: attributes of the operator.
        """
        return self.writer.apply(
            operator, inputs, self.shape, self.grid, self.name, *more, **attributes
        )

    def of_dtype(self, operator: str, *more: str, **attributes: Any) -> Array:
        """Adds an ONNX operator with an output of the call's dtype, without a grid.

        Args:
            operator: name of the operator in ONNX.
            *more: names of further inputs, after those of the call.
            **attributes: attributes of the operator.
        """
        names = [*(x.name for x in self.inputs), *more]
        made = self.writer.node(operator, names, self.name, **attributes)
        return Array(made, self.shape, self.dtype)


Form = Callable[[Call, Any], Array]
"""Function that adds a call of an operator to the graph, and returns the output."""


def plain(name: str, **attributes: Any) -> Form:
    """The form of an operator that is a single ONNX operator on the same inputs."""
    return lambda call, _: call.write(name, call.inputs, **attributes)


def clipped(call: Call, x: Array, low: float, high: float) -> Array:
    """Clips values, unless all integers of the grid are between the bounds."""
    writer, bounds = call.writer, (low, high)
    if bounds == (-math.inf, math.inf):
        return x
    name = f"{call.name}/clipped"
    if call.weight is not None and call.weight.qvalue.ndim == 2:
        # With a Clip or Relu, onnxruntime would make a Gemm of the product, and
        # dequantize the weight at each call.
        for operator, end in (("Max", low), ("Min", high)):
            if not math.isinf(end):
                bound = number(writer, end, x.dtype)
                x = writer.apply(operator, [x], x.shape, None, name, bound)
        return x
    if call.grid is None:
        ends = [
            "" if math.isinf(end) else number(writer, end, x.dtype) for end in bounds
        ]
        return writer.apply("Clip", [x], x.shape, None, name, *ends)
    dtype, zero_point = stored_grid(call.grid)
    # Rounding is monotonic, so clipping integers equals rounding clipped values.
    limits = np.iinfo(dtype)
    with np.errstate(over="ignore"):
        steps = np.rint(np.asarray(bounds, np.float32) / np.float32(call.grid.scale))
    ends = np.clip(steps + zero_point, limits.min, limits.max)
    if tuple(ends) == (limits.min, limits.max):
        return x
    if dtype != "uint8":
        floats = [
            number(writer, float(call.grid.scale * (end - zero_point)), np.float32)
            for end in ends
        ]
        return writer.apply("Clip", [x], x.shape, x.grid, name, *floats)
    names = [writer.initializer(end, dtype, "bound") for end in ends]
    made = writer.node("Clip", [x.name, *names], name)
    return dataclasses.replace(x, name=made)


def number(writer: Writer, value: float, dtype: Any) -> str:
    """Adds a scalar constant; returns its name."""
    return writer.initializer(np.asarray(value), np.dtype(dtype).name, "number")

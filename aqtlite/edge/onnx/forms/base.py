"""Shared parts of forms in ONNX."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx.writer import Array, Writer, stored_grid


@dataclasses.dataclass(frozen=True)
class Output:
    """The call of an operator that a form writes."""

    shape: tuple[int, ...]
    dtype: Any
    grid: Grid | None
    """None if it is not rounded."""

    name: str


Form = Callable[[Writer, Any, Sequence[Array], Output], Array]
"""Adds an operator of inputs to a graph; returns its output."""


def plain(name: str, **attributes: Any) -> Form:
    """An operator of ONNX that needs nothing else."""

    def form(writer: Writer, _: Any, inputs: Sequence[Array], output: Output) -> Array:
        return writer.apply(
            name, inputs, output.shape, output.grid, output.name, **attributes
        )

    return form


def clipped(writer: Writer, x: Array, low: float, high: float, output: Output) -> Array:
    """Clips values, unless all integers of their grid are between the bounds."""
    bounds = (low, high)
    if bounds == (-math.inf, math.inf):
        return x
    name = f"{output.name}/clipped"
    if output.grid is None:
        ends = [
            "" if math.isinf(end) else number(writer, end, x.dtype) for end in bounds
        ]
        return writer.apply("Clip", [x], x.shape, None, name, *ends)
    dtype, zero_point = stored_grid(output.grid)
    # Rounding keeps the order, so clipping integers is rounding clipped values.
    limits = np.iinfo(dtype)
    with np.errstate(over="ignore"):
        steps = np.rint(np.asarray(bounds, np.float32) / np.float32(output.grid.scale))
    ends = np.clip(steps + zero_point, limits.min, limits.max)
    if tuple(ends) == (limits.min, limits.max):
        return x
    if dtype != "uint8":
        floats = [
            number(writer, float(output.grid.scale * (end - zero_point)), np.float32)
            for end in ends
        ]
        return writer.apply("Clip", [x], x.shape, x.grid, name, *floats)
    names = [writer.initializer(end, dtype, "bound") for end in ends]
    made = writer.node("Clip", [x.name, *names], name)
    return dataclasses.replace(x, name=made)


def number(writer: Writer, value: float, dtype: Any) -> str:
    """Adds one number; returns its name."""
    return writer.initializer(np.asarray(value), np.dtype(dtype).name, "number")

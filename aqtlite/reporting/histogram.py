"""Histograms of an operand before and after it is quantized."""

import dataclasses
from typing import Any

import jax
import numpy as np

from aqtlite import errors
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes

_BINS = 64


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How the elements of an operand lie on its grid, in units of their scales."""

    name: str
    low: float
    """Left edge of the first bin."""

    high: float
    """Right edge of the last bin."""

    before: tuple[int, ...]
    """Number of elements in each bin, before rounding."""

    after: tuple[int, ...]
    grid: tuple[float, ...]
    """Values of the grid that occur."""


def of(name: str, x: Any, quantized: Any) -> Histogram:
    """Returns the histograms of an operand.

    Each element is divided by its scale, so that channels of different scales share one
    grid. Elements that are not finite do not count.

    Args:
        name: name of the operand.
        x: the operand in float.
        quantized: the same as a `QTensor`.

    Raises:
        TypeError: if `quantized` is no `QTensor`.
        ValueError: if the shapes differ, or no element is finite.
    """
    if not isinstance(quantized, QTensor):
        raise TypeError(
            f"the operand {name!r} needs its floats and a QTensor, got "
            f"{errors.brief(quantized)}"
        )
    exact = np.asarray(x, np.float32)
    if exact.shape != quantized.shape:
        raise ValueError(
            f"the operand {name!r} has the shape {exact.shape}, and the QTensor "
            f"{quantized.shape}: give the operand that was quantized"
        )
    rounded = np.asarray(quantized.dequant(), np.float32)
    scale = _scale(quantized.scale, exact.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        left, right = exact / scale, rounded / scale
    left, right = left[np.isfinite(left)], right[np.isfinite(right)]
    if not left.size or not right.size:
        raise ValueError(f"the operand {name!r} has no finite elements to draw")
    low = float(min(left.min(), right.min()))
    high = max(float(max(left.max(), right.max())), low + 1e-6)
    before, after = (np.histogram(v, _BINS, (low, high))[0] for v in (left, right))
    grid = np.unique(np.round(right, 3))
    return Histogram(
        name=name,
        low=low,
        high=high,
        before=tuple(map(int, before)),
        after=tuple(map(int, after)),
        grid=tuple(map(float, grid)),
    )


def _scale(scale: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    """Repeats scales of blocks, one for each element; one where they do not fit."""
    sizes = zip(scale.shape, shape, strict=False)
    if scale.ndim != len(shape) or any(size % n for n, size in sizes):
        return np.ones((), np.float32)
    every = block_shapes.repeat(scale, shape, range(len(shape)))
    return np.asarray(every, np.float32)

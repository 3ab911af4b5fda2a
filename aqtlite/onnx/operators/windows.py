"""Strides, dilations and padding of windows, for convolutions and pooling."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from aqtlite.onnx.evaluation import Call


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that moves over the spatial axes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    @classmethod
    def of(cls, call: Call, sizes: Sequence[int]) -> "Window":
        """Returns the window of a node, from its attributes."""
        ones = [1] * len(sizes)
        strides = call.attribute("strides") or ones
        dilations = call.attribute("dilations") or ones
        return cls(tuple(sizes), tuple(strides), tuple(dilations))

    @property
    def extents(self) -> tuple[int, ...]:
        """Sizes with the holes of dilation."""
        pairs = zip(self.sizes, self.dilations, strict=True)
        return tuple((size - 1) * dilation + 1 for size, dilation in pairs)

    def pads(self, call: Call, spatial: Sequence[int]) -> list[tuple[int, int]]:
        """Returns padding at both ends of each spatial axis."""
        kind = call.attribute("auto_pad", "NOTSET")
        if kind == "VALID":
            return [(0, 0)] * len(self.sizes)
        if kind == "NOTSET":
            return pairs_of(call.attribute("pads") or [0] * 2 * len(self.sizes))
        pads = []
        for size, stride, extent in zip(
            spatial, self.strides, self.extents, strict=True
        ):
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            pads.append(halves(total, kind == "SAME_UPPER"))
        return pads

    def ceiled(
        self, spatial: Sequence[int], pads: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Returns padding with which a last, incomplete window is complete.

        A window that would begin in the padding at the end is left out.
        """
        result = []
        for size, stride, extent, (low, high) in zip(
            spatial, self.strides, self.extents, pads, strict=True
        ):
            count = -(-(size + low + high - extent) // stride) + 1
            if (count - 1) * stride >= size + low:
                count -= 1
            result.append((low, (count - 1) * stride + extent - size - low))
        return result

    def counts(
        self, spatial: Sequence[int], pads: Sequence[tuple[int, int]], inside: list
    ) -> np.ndarray:
        """Returns the number of elements in each window, of those that are counted.

        Args:
            spatial: sizes of the spatial axes.
            pads: padding of the axes.
            inside: the part of the padding that is counted.
        """
        result = np.ones(())
        for axis, size in enumerate(spatial):
            low, high = pads[axis]
            counted = np.zeros(low + size + high)
            counted[low - inside[axis][0] : low + size + inside[axis][1]] = 1
            stop = len(counted) - self.extents[axis] + 1
            starts = np.arange(0, stop, self.strides[axis])
            taps = np.arange(self.sizes[axis]) * self.dilations[axis]
            result = np.multiply.outer(
                result, counted[starts[:, None] + taps].sum(axis=1)
            )
        return result


def pairs_of(pads: Sequence[int]) -> list[tuple[int, int]]:
    """Returns pairs from ONNX's list, which has the beginnings first."""
    half = len(pads) // 2
    return list(zip(pads[:half], pads[half:], strict=True))


def halves(total: int, more_at_end: bool) -> tuple[int, int]:
    """Divides padding between the ends of an axis."""
    less, more = total // 2, total - total // 2
    return (less, more) if more_at_end else (more, less)

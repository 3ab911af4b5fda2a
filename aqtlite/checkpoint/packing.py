"""Packing of integers of few bits, several to a byte.

Values are coded as ``(value - lowest) / step``, and the codes along one axis fill bytes
from the lowest bit up. The last byte along the axis is padded with zeros: ``[..., n]``
values of b bits are ``[..., ceil(n * b / 8)]`` bytes.
"""

import dataclasses

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.formats.base import Sliceable
from aqtlite.qtensor import codes


@dataclasses.dataclass(frozen=True)
class Packing:
    """The binary code of an array's values.

    >>> ternary = Packing(bits=2, lowest=-1)
    >>> packed = ternary.pack(np.array([-1, 0, 1, 1, -1], np.int8))
    >>> [f"{byte:08b}" for byte in packed]
    ['10100100', '00000000']
    >>> ternary.unpack(packed, ArrayInfo((5,), np.dtype("int8"))).tolist()
    [-1, 0, 1, 1, -1]
    """

    bits: int
    """Width of a code: 1, 2, 4 or 8."""

    lowest: int
    """The smallest value, coded as 0."""

    step: int = 1
    """Difference of adjacent values: 1, or 2 for grids of odd integers."""

    axis: int = -1
    """Axis along which values share bytes: -1 for the last, others from the first."""

    def __post_init__(self):
        fits = (
            all(type(x) is int for x in dataclasses.astuple(self))
            and self.step in (1, 2)
            and abs(self.lowest) < codes.LOWEST.get(self.bits, 0)
            and self.axis >= -1
        )
        if not fits:
            raise ValueError(f"no packing: {self}")

    @property
    def _per_byte(self) -> int:
        return 8 // self.bits

    @property
    def _dtype(self) -> np.dtype:
        """A dtype of all values."""
        return np.dtype(np.int16 if self.bits == 8 else np.int8)

    def packed(self, info: ArrayInfo) -> ArrayInfo:
        """Shape and dtype of the packed array."""
        axis = self._axis_of(info)
        shape = codes.packed_shape(info.shape, self.bits, axis)
        return ArrayInfo(shape, np.dtype("uint8"))

    def _axis_of(self, info: ArrayInfo) -> int:
        return len(info.shape) - 1 if self.axis == -1 else self.axis

    def pack(self, x: np.ndarray) -> np.ndarray:
        """Packs an array.

        Values off the grid, which occur in channels with a scale of NaN, are changed
        to values on the grid.
        """
        given = ArrayInfo(x.shape, x.dtype)
        info, axis = self.packed(given), self._axis_of(given)
        packed = np.zeros(info.shape, info.dtype)
        highest = self.lowest + self.step * (2**self.bits - 1)
        for i in range(self._per_byte):
            values = x[_along(axis, slice(i, None, self._per_byte))].astype(self._dtype)
            np.clip(values, self.lowest, highest, out=values)
            values -= self._dtype.type(self.lowest)
            values >>= self.step - 1
            bytes_of = _along(axis, slice(values.shape[axis]))
            packed[bytes_of] |= values.astype(np.uint8) << self.bits * i
        return packed

    def unpack(self, packed: np.ndarray, info: ArrayInfo) -> np.ndarray:
        """Unpacks an array of the shape and dtype in `info`."""
        x, axis = np.empty(info.shape, self._dtype), self._axis_of(info)
        for i in range(self._per_byte):
            lane = x[_along(axis, slice(i, None, self._per_byte))]
            digits = packed[_along(axis, slice(lane.shape[axis]))] >> self.bits * i
            digits &= 2**self.bits - 1
            np.multiply(digits.astype(self._dtype), self.step, out=lane)
            lane += self._dtype.type(self.lowest)
        return x.astype(info.dtype, copy=False)

    def unpack_slice(
        self, packed: Sliceable, info: ArrayInfo, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Unpacks a slice of an array, reading only the bytes that hold it.

        Args:
            packed: the packed array.
            info: shape and dtype of the whole unpacked array.
            index: a slice without a step for each axis.
        """
        axis = self._axis_of(info)
        start, stop, _ = index[axis].indices(info.shape[axis])
        first, end = start // self._per_byte, -(-stop // self._per_byte)
        before, after = index[:axis], index[axis + 1 :]
        part = np.asarray(packed[(*before, slice(first, end), *after)])
        shape = list(part.shape)
        shape[axis] = (end - first) * self._per_byte
        x = self.unpack(part, ArrayInfo(tuple(shape), info.dtype))
        first *= self._per_byte
        return x[_along(axis, slice(start - first, stop - first))]


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    """Index of a part along one axis."""
    return (*(slice(None),) * axis, part)


def packing_of(info: ArrayInfo, grid: object = None) -> Packing | None:
    """Selects the narrowest packing of an array.

    Args:
        info: shape and dtype of the array.
        grid: grid of the values; None if unknown.

    Returns:
        The packing; None for scalars and for values without a narrower code, which are
        stored unpacked.
    """
    code = codes.code_of(info.dtype, grid) if info.shape else None
    if code is None:
        return None
    axis = codes.packed_axis(info.shape, code.bits)
    return Packing(*code, axis=-1 if axis == len(info.shape) - 1 else axis)

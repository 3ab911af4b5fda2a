"""The kernel that sums over the channels of integers in planes of bytes.

It unpacks a line of positions into the cache, with four channels of a position beside
each other, and multiplies them with all rows of the other operand.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from aqtlite.lowering.forms.plane_kernel import PlaneFunction, Sizes

POSITIONS = 64
"""Number of positions that are unpacked at a time: a line of the cache."""

CHANNELS = 4
"""Number of channels of a slab whose products are added at a time."""

# Number of rows of the other operand whose sums stay in registers.
_TOGETHER = 2

# Vectors of a channel's positions, once there are four channels in each.
_QUARTERS = range(4)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Pointers to what a vector of positions takes, and rows from one on."""

    values: Any
    """Unpacked, ``(words, POSITIONS, CHANNELS)``."""

    x: Any
    starts: Any
    out: Any


class OfChannels(PlaneFunction):
    """Sums over channels: of rows ``(slabs, channels of a slab)``, whose last axis is
    padded to a multiple of `CHANNELS`."""

    def units(self, sizes):
        count = self.divided(self.sum(sizes.length, POSITIONS - 1), POSITIONS)
        lines = self.sum(sizes.rows, 2)
        return count, self.times(sizes.products, POSITIONS, lines)

    def compute_units(self, arrays, sizes, start, stop):
        count, _ = self.units(sizes)
        values = self.call(
            "malloc", self.pointer, self.times(sizes.products, POSITIONS)
        )
        with self.loop(start, stop) as unit:
            batch, index = self.at.sdiv(unit, count), self.at.srem(unit, count)
            # Positions that are no whole line are computed with those before them.
            last = self.at.sub(sizes.length, self.long(POSITIONS))
            position = self.least(self.times(index, POSITIONS), last)
            place = self.sum(self.times(batch, sizes.bytes, sizes.length), position)
            self._unpack(self.offset(arrays.packed, place), sizes, values)

            def multiply(row: Any, together: int) -> None:
                first = self.sum(self.times(batch, sizes.rows), row)
                place = self.sum(self.times(first, sizes.columns), position)
                here = _Place(
                    values,
                    self.offset(arrays.x, self.times(first, sizes.products)),
                    self.offset(arrays.starts, self.times(first, 4)),
                    self.offset(arrays.out, self.times(place, 4)),
                )
                with self.loop(0, POSITIONS, self.width) as start:
                    values_of = self.offset(values, self.times(start, CHANNELS))
                    out = self.offset(here.out, self.times(start, 4))
                    moved = dataclasses.replace(here, values=values_of, out=out)
                    self._multiply(moved, sizes, together)

            self.by_rows(sizes.rows, _TOGETHER, multiply)
        self.call("free", self.none, values)

    def _unpack(self, packed: Any, sizes: Sizes, values: Any) -> None:
        """Writes the integers of a line of positions as `_Place` has them."""
        rows = self.divided(sizes.bytes, len(self.blocks))
        groups = self.divided(sizes.products, CHANNELS * len(self.slabs))
        vector = self.ir.VectorType(self.byte, self.width)
        with self.loop(0, groups) as group:
            first = self.times(group, CHANNELS)
            # Those behind the last row are multiplied with zeros.
            read = [
                self.least(self.sum(first, i), self.sum(rows, -1)) for i in range(4)
            ]
            lines = [
                [
                    self.times(self.sum(self.times(rows, block), row), sizes.length)
                    for row in read
                ]
                for block in self.blocks
            ]
            for line in itertools.chain(*lines):
                self.prefetch(packed, self.sum(line, POSITIONS))
            with self.loop(0, POSITIONS, self.width) as start:
                vectors = [
                    self._interleaved(
                        [
                            self.load(packed, self.sum(line, start), vector)
                            for line in one
                        ]
                    )
                    for one in lines
                ]
                for quarter in _QUARTERS:
                    slabs = self.unpacked([one[quarter] for one in vectors])
                    for slab, value in enumerate(slabs):
                        word = self.sum(self.times(groups, slab), group)
                        place = self.sum(self.times(word, POSITIONS), start)
                        place = self.times(place, CHANNELS)
                        self.store(value, values, self.sum(place, self.width * quarter))

    def _interleaved(self, rows: Sequence[Any]) -> list[Any]:
        """Four bytes of each position, in an int32.

        Of each 16 positions, the first vector has the first four, and so on.
        """
        a, b, c, d = rows
        ab, cd = self._zipped(a, b, 1), self._zipped(c, d, 1)
        return [
            self.at.bitcast(one, self.ints)
            for x, y in zip(ab, cd, strict=True)
            for one in self._zipped(x, y, 2)
        ]

    def _zipped(self, a: Any, b: Any, size: int) -> tuple[Any, Any]:
        """Interleaves elements of some bytes: of the lower halves of each 16 bytes, and
        of the upper halves."""
        count, lane = self.width // size, 16 // size
        kind = self.ir.VectorType(self.ir.IntType(8 * size), count)
        a, b = (self.at.bitcast(x, kind) for x in (a, b))
        lower, upper = (
            self.shuffled(
                a,
                [
                    start + half + i + other
                    for start in range(0, count, lane)
                    for i in range(lane // 2)
                    for other in (0, count)
                ],
                b,
            )
            for half in (0, lane // 2)
        )
        return lower, upper

    def _multiply(self, place: _Place, sizes: Sizes, rows: int) -> None:
        """Writes the sums of some rows and a vector of positions."""
        totals = [[self.variable(self.ints) for _ in _QUARTERS] for _ in range(rows)]
        for row, of_row in enumerate(totals):
            first = self.load(place.starts, 4 * row, self.int, 4)
            for one in of_row:
                self.at.store(self.splat(first, self.how.lanes), one)

        def terms(word: Any) -> list[tuple[Any, Any]]:
            of_word = self.times(word, POSITIONS * CHANNELS)
            values = [
                self.load(place.values, self.sum(of_word, self.width * i), self.ints)
                for i in _QUARTERS
            ]
            found = []
            for row in range(rows):
                start = self.times(sizes.products, row)
                at = self.sum(start, self.times(word, CHANNELS))
                factor = self.splat(self.load(place.x, at, self.int), self.how.lanes)
                found += [(value, factor) for value in values]
            return found

        words = self.divided(sizes.products, CHANNELS)
        self.accumulate([*itertools.chain(*totals)], words, terms)
        for row, of_row in enumerate(totals):
            line = self.times(sizes.columns, row)
            for quarter, one in enumerate(of_row):
                value = self.at.load(one)
                for lane in range(self.how.lanes // 4):
                    four = self.shuffled(value, [4 * lane + i for i in range(4)])
                    position = self.sum(line, 16 * lane + 4 * quarter)
                    self.store(four, place.out, self.times(position, 4))

"""The kernel that sums over the positions of integers in planes of bytes.

It unpacks the channels that share bytes in registers, and multiplies them with rows of
the other operand.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from aqtlite.lowering.forms.plane_kernel import PlaneFunction, Sizes

# Number of sums that stay in registers.
_SUMS = 8


class OfPositions(PlaneFunction):
    """Sums over positions."""

    def units(self, sizes):
        rows = self.divided(sizes.bytes, len(self.blocks))
        lines = self.sum(sizes.rows, 1)
        return rows, self.times(sizes.length, len(self.slabs), lines)

    def compute_units(self, arrays, sizes, start, stop):
        count, _ = self.units(sizes)
        with self.loop(start, stop) as unit:
            batch, index = self.at.sdiv(unit, count), self.at.srem(unit, count)
            first = self.sum(self.times(batch, sizes.bytes), index)
            lines = [self.sum(first, self.times(count, block)) for block in self.blocks]
            packed = [
                self.offset(arrays.packed, self.times(line, sizes.length))
                for line in lines
            ]

            def multiply(row: Any, together: int) -> None:
                first = self.sum(self.times(batch, sizes.rows), row)
                x = self.offset(arrays.x, self.times(first, sizes.products))
                for i, of_row in enumerate(self._multiply(packed, x, sizes, together)):
                    line = self.sum(first, i)
                    start = self.load(arrays.starts, self.times(line, 4), self.int, 4)
                    for slab, one in enumerate(of_row):
                        channel = self.sum(self.times(count, slab), index)
                        place = self.sum(self.times(line, sizes.columns), channel)
                        with self.if_any(channel, sizes.columns):
                            total = self.at.add(self.added(self.at.load(one)), start)
                            self.store(total, arrays.out, self.times(place, 4), 4)

            self.by_rows(sizes.rows, max(1, _SUMS // len(self.slabs)), multiply)

    def _multiply(
        self, packed: Sequence[Any], x: Any, sizes: Sizes, rows: int
    ) -> list[list[Any]]:
        """The sums of some rows and of the channels that share bytes, as variables."""
        at = self.at
        totals = [[self.variable(self.ints) for _ in self.slabs] for _ in range(rows)]
        everything = [*itertools.chain(*totals)]
        for one in everything:
            at.store(self.constant(self.ints, 0), one)

        def terms(position: Any, mask: Any = None) -> list[tuple[Any, Any]]:
            values = self.unpacked(
                [self.load(one, position, self.ints) for one in packed]
            )
            found = []
            for row in range(rows):
                place = self.sum(self.times(sizes.products, row), position)
                factor = self.load(x, place, self.ints)
                factor = factor if mask is None else at.and_(factor, mask)
                found += [(value, factor) for value in values]
            return found

        self.accumulate(
            everything,
            self.divided(sizes.length, self.width),
            lambda vector: terms(self.times(vector, self.width)),
        )
        # Positions that are no whole vector are read with those before them.
        left = at.srem(sizes.length, self.long(self.width))
        with self.if_any(0, left):
            last = at.sub(sizes.length, self.long(self.width))
            mask = self._last_bytes(left)
            self.add(everything, 1, lambda _: terms(last, mask))
        return totals

    def _last_bytes(self, count: Any) -> Any:
        """A mask of the last bytes of a vector."""
        at, kind = self.at, self.ir.VectorType(self.byte, self.width)
        first = at.trunc(at.sub(self.long(self.width), count), self.byte)
        numbers = self.ir.Constant(kind, list(range(self.width)))
        is_last = at.icmp_unsigned(">=", numbers, self.splat(first, self.width))
        return at.bitcast(at.sext(is_last, kind), self.ints)

"""Kernels of integers in planes of bytes (`planes`), for x86-64.

One sums over channels, as queries by keys, and one over positions, as probabilities by
values. Both unpack integers in registers, raise them to unsigned ones, and multiply
those by int8. `plane_products` calls them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from aqtlite.lowering.forms import custom_call, planes
from aqtlite.lowering.forms.products_of_bytes import Instructions

POSITIONS = 64
"""Number of positions that are computed at a time: a line of the cache."""

ROWS = 4
"""Number of channels of a slab that are multiplied at a time."""

# Number of products that are added before the sums are widened.
_STEPS = 8

# Where the buffer of an argument has the number of its axes and their sizes.
_RANK, _SIZES = 32, 40

Terms = Callable[[Any], Sequence[tuple[Any, Any]]]
"""The factors of each sum at a step, uint8 and int8 in vectors of int32."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Values of a call."""

    batch: Any
    rows: Any
    """Rows of the other operand."""

    bytes: Any
    """Bytes of a position."""

    length: Any
    """Positions."""

    products: Any
    """Elements of a row of the other operand."""

    columns: Any
    """Columns of the result."""


class PlaneFunction(custom_call.Function, abc.ABC):
    """Writes a kernel.

    Its arguments are the planes, ``(*batch, bytes, length)``, and the other operand,
    int8, ``(*batch, rows, products)``; its result is int32, ``(*batch, rows,
    columns)``.
    """

    words = 4 + len(dataclasses.fields(Sizes))

    def __init__(self, bits: int, instructions: Instructions):
        self.bits, self.how = bits, instructions
        self.slabs = planes.pieces(bits)
        # As for 4 bits, eight products of fewer fit 16 bits.
        self.products = instructions.products(min(planes.WIDTHS[-1], 4))
        super().__init__()

    @property
    def ints(self) -> Any:
        return self.how.ints(self)

    @property
    def width(self) -> int:
        """The number of bytes in a vector."""
        return 4 * self.how.lanes

    @abc.abstractmethod
    def units(self, sizes: Sizes) -> tuple[Any, Any]:
        """Returns the number of parts of a batch that threads divide, and the work of
        one, as a number of products."""

    @abc.abstractmethod
    def compute_units(
        self, arrays: tuple[Any, ...], sizes: Sizes, start: Any, stop: Any
    ) -> None:
        """Computes parts of the result."""

    def memory(self, frame):
        sizes = self._sizes(frame)
        return self.times(sizes.batch, sizes.rows, 4)

    def prepare(self, frame, state, memory):
        sizes = self._sizes(frame)
        packed, x = (self.data(self.argument(frame, i)) for i in range(2))
        words = (packed, x, memory, self.data(self.result(frame)))
        values = [getattr(sizes, one.name) for one in dataclasses.fields(Sizes)]
        for i, value in enumerate((*words, *values)):
            self.store(value, state, 8 * i, 8)
        with self.loop(0, self.times(sizes.batch, sizes.rows)) as row:
            total = self._sum(
                self.offset(x, self.times(row, sizes.products)), sizes.products
            )
            # What raising the other integers adds, negated.
            total = self.at.mul(total, self.int(-(2 ** (self.bits - 1))))
            self.store(total, memory, self.times(row, 4), 4)
        count, work = self.units(sizes)
        return self.times(sizes.batch, count), work

    def compute(self, state, start, stop):
        arrays = tuple(self.word(state, i, self.pointer) for i in range(4))
        sizes = Sizes(*(self.word(state, i) for i in range(4, self.words)))
        self.compute_units(arrays, sizes, start, stop)

    def _sizes(self, frame: Any) -> Sizes:
        packed, x = (self.argument(frame, i) for i in range(2))
        rank = self.load(packed, _RANK, self.long)
        batch = self.variable(self.long)
        self.at.store(self.long(1), batch)
        with self.loop(0, self.sum(rank, -2)) as axis:
            size = self._size(packed, axis)
            self.at.store(self.times(self.at.load(batch), size), batch)
        last, before = self.sum(rank, -1), self.sum(rank, -2)
        return Sizes(
            self.at.load(batch),
            self._size(x, before),
            self._size(packed, before),
            self._size(packed, last),
            self._size(x, last),
            self._size(self.result(frame), last),
        )

    def _size(self, buffer: Any, axis: Any) -> Any:
        sizes = self.load(buffer, _SIZES, self.pointer)
        return self.load(sizes, self.times(axis, 8), self.long)

    def _sum(self, x: Any, count: Any) -> Any:
        """The sum of int8."""
        at, lanes = self.at, 8
        kind = self.ir.VectorType(self.int, lanes)
        small = self.ir.VectorType(self.byte, lanes)
        total, rest = self.variable(kind), self.variable(self.int)
        at.store(self.constant(kind, 0), total)
        at.store(self.int(0), rest)
        whole = at.and_(count, self.long(-lanes))
        with self.any(0, whole), self.loop(0, whole, lanes) as i:
            wide = at.sext(self.load(x, i, small), kind)
            at.store(at.add(at.load(total), wide), total)
        with self.any(whole, count), self.loop(whole, count) as i:
            wide = at.sext(self.load(x, i, self.byte), self.int)
            at.store(at.add(at.load(rest), wide), rest)
        return at.add(self.added(at.load(total)), at.load(rest))

    def any(self, start: Any, stop: Any) -> Any:
        """Runs its body if there are indices from `start` to `stop`."""
        start, stop = self._as_long(start), self._as_long(stop)
        return self.at.if_then(self.at.icmp_signed("<", start, stop))

    def added(self, x: Any) -> Any:
        """The sum of a vector of int32."""
        name = f"llvm.vector.reduce.add.v{x.type.count}i32"
        return self.call(name, self.int, x)

    def bytes_of(self, value: int) -> Any:
        """A byte in all bytes of a vector of int32."""
        return self.constant(self.ints, value * 0x01010101)

    def raised(self, blocks: Sequence[Any]) -> list[Any]:
        """Flips the upper bit of each integer, which adds 2^(bits - 1)."""
        flipped = [0] * len(blocks)
        for slab in self.slabs:
            *_, last = slab
            flipped[last.block] |= 1 << (last.place + last.width - 1)
        return [
            self.at.xor(x, self.bytes_of(byte)) if byte else x
            for x, byte in zip(blocks, flipped, strict=True)
        ]

    def unpacked(self, blocks: Sequence[Any]) -> list[Any]:
        """The unsigned integers of each slab, of vectors of the blocks of bytes."""
        at, found = self.at, []
        for slab in self.slabs:
            parts = []
            for piece in slab:
                part, shift = blocks[piece.block], piece.place - piece.lowest
                if shift:
                    move = at.lshr if shift > 0 else at.shl
                    part = move(part, self.constant(self.ints, abs(shift)))
                mask = (2**piece.width - 1) << piece.lowest
                parts.append(at.and_(part, self.bytes_of(mask)))
            found.append(functools.reduce(at.or_, parts))
        return found

    def accumulate(self, totals: Sequence[Any], count: Any, terms: Terms) -> None:
        """Adds the products of steps to sums, which are variables."""
        whole = self.at.and_(count, self.long(-_STEPS))
        with self.any(0, whole), self.loop(0, whole, _STEPS) as step:
            self.add(totals, _STEPS, lambda i: terms(self.sum(step, i)))
        with self.any(whole, count), self.loop(whole, count) as step:
            self.add(totals, 1, lambda i: terms(self.sum(step, i)))

    def add(self, totals: Sequence[Any], count: int, terms: Terms) -> None:
        """Adds the products of some steps to sums, and widens them once."""
        before = [self.at.load(one) for one in totals]
        parts = [self.products.started(one) for one in before]
        for i in range(count):
            parts = [
                self.products.multiplied(self, part, a, b)
                for part, (a, b) in zip(parts, terms(i), strict=True)
            ]
        for place, total, part in zip(totals, before, parts, strict=True):
            self.at.store(self.products.finished(self, total, part), place)

    def by_rows(
        self, rows: Any, at_once: int, body: Callable[[Any, int], None]
    ) -> None:
        """Runs a body for rows, several at once as long as there are so many."""
        done = self.long(0)
        for count in dict.fromkeys((at_once, 1)):
            left = self.at.sub(rows, done)
            after = self.sum(
                done, at_sub := self.at.sub(left, self.at.srem(left, self.long(count)))
            )
            del at_sub
            with self.any(done, after), self.loop(done, after, count) as row:
                body(row, count)
            done = after


class OfChannels(PlaneFunction):
    """Sums over channels: of rows ``(slabs, rows of a slab, padded to fours)``."""

    def units(self, sizes):
        count = self.at.sdiv(
            self.sum(sizes.length, POSITIONS - 1), self.long(POSITIONS)
        )
        lines = self.sum(sizes.rows, 2)
        return count, self.times(sizes.products, POSITIONS, lines)

    def compute_units(self, arrays, sizes, start, stop):
        packed, x, starts, out = arrays
        count, _ = self.units(sizes)
        words = self.at.sdiv(sizes.products, self.long(ROWS))
        scratch = self.call("malloc", self.pointer, self.times(words, ROWS * POSITIONS))
        with self.loop(start, stop) as unit:
            batch, index = self.at.sdiv(unit, count), self.at.srem(unit, count)
            # Positions that are no whole line are computed with those before them.
            position = self.least(
                self.times(index, POSITIONS),
                self.at.sub(sizes.length, self.long(POSITIONS)),
            )
            before = self.times(batch, sizes.bytes, sizes.length)
            self._unpack(
                self.offset(packed, self.sum(before, position)), sizes, words, scratch
            )

            def multiply(row: Any, together: int) -> None:
                first = self.sum(self.times(batch, sizes.rows), row)
                place = self.times(
                    self.sum(self.times(first, sizes.columns), position), 4
                )
                self._multiply(
                    (scratch, words),
                    self.offset(x, self.times(first, sizes.products)),
                    self.offset(starts, self.times(first, 4)),
                    self.offset(out, place),
                    sizes,
                    together,
                )

            self.by_rows(sizes.rows, 2, multiply)
        self.call("free", self.none, scratch)

    def _unpack(self, packed: Any, sizes: Sizes, words: Any, scratch: Any) -> None:
        """Writes the integers of positions: for each four channels, theirs."""
        at = self.at
        rows = at.sdiv(sizes.bytes, self.long(planes.blocks(self.bits)))
        groups = at.sdiv(words, self.long(len(self.slabs)))
        with self.loop(0, groups) as group:
            # Of rows behind the last, the products are zero.
            read = [
                self.least(self.sum(self.times(group, ROWS), i), self.sum(rows, -1))
                for i in range(ROWS)
            ]
            for block in range(planes.blocks(self.bits)):
                for row in read:
                    line = self.times(
                        self.sum(self.times(rows, block), row), sizes.length
                    )
                    self.prefetch(packed, self.sum(line, 64))
            for start in range(0, POSITIONS, self.width):
                blocks = [
                    self._interleaved(
                        [
                            self.load(
                                packed,
                                self.sum(
                                    self.times(
                                        self.sum(self.times(rows, block), row),
                                        sizes.length,
                                    ),
                                    start,
                                ),
                                self.ir.VectorType(self.byte, self.width),
                            )
                            for row in read
                        ]
                    )
                    for block in range(planes.blocks(self.bits))
                ]
                for quarter, vectors in enumerate(zip(*blocks, strict=True)):
                    slabs = self.unpacked(self.raised(vectors))
                    for slab, value in enumerate(slabs):
                        word = self.sum(self.times(groups, slab), group)
                        place = self.times(word, ROWS * POSITIONS)
                        behind = ROWS * start + self.width * quarter
                        self.store(value, scratch, self.sum(place, behind))

    def _interleaved(self, rows: Sequence[Any]) -> list[Any]:
        """Four bytes of each position, as int32: in each lane of 16 positions, the
        vectors have four after four."""
        a, b, c, d = rows
        ab, cd = self._zipped(a, b, 1), self._zipped(c, d, 1)
        return [
            self.at.bitcast(one, self.ints)
            for x, y in zip(ab, cd, strict=True)
            for one in self._zipped(x, y, 2)
        ]

    def _zipped(self, a: Any, b: Any, size: int) -> tuple[Any, Any]:
        """Interleaves elements of some bytes of the lower halves of lanes of 16 bytes,
        and of the upper halves."""
        kind = self.ir.VectorType(self.ir.IntType(8 * size), self.width // size)
        a, b = (self.at.bitcast(x, kind) for x in (a, b))
        lane = 16 // size
        halves = []
        for first in (0, lane // 2):
            order = [
                start + first + i + other * kind.count
                for start in range(0, kind.count, lane)
                for i in range(lane // 2)
                for other in (0, 1)
            ]
            halves.append(self.shuffled(a, order, b))
        return halves[0], halves[1]

    def _multiply(
        self,
        unpacked: tuple[Any, Any],
        x: Any,
        starts: Any,
        out: Any,
        sizes: Sizes,
        rows: int,
    ) -> None:
        """Writes the sums of some rows and the unpacked positions."""
        scratch, words = unpacked
        totals = [[self.variable(self.ints) for _ in range(4)] for _ in range(rows)]
        for start in range(0, POSITIONS, self.width):
            for row, of_row in enumerate(totals):
                first = self.splat(
                    self.load(starts, 4 * row, self.int, 4), self.how.lanes
                )
                for one in of_row:
                    self.at.store(first, one)

            def terms(step: Any) -> list[tuple[Any, Any]]:
                place = self.times(step, ROWS * POSITIONS)
                values = [
                    self.load(
                        scratch,
                        self.sum(place, ROWS * start + self.width * quarter),  # noqa: B023
                        self.ints,
                    )
                    for quarter in range(4)
                ]
                found = []
                for row in range(rows):
                    at = self.sum(
                        self.times(sizes.products, row), self.times(step, ROWS)
                    )
                    factor = self.splat(self.load(x, at, self.int), self.how.lanes)
                    found += [(value, factor) for value in values]
                return found

            self.accumulate([one for of_row in totals for one in of_row], words, terms)
            for row, of_row in enumerate(totals):
                line = self.times(sizes.columns, row)
                for quarter, one in enumerate(of_row):
                    value = self.at.load(one)
                    for lane in range(self.how.lanes // 4):
                        four = self.shuffled(value, list(range(4 * lane, 4 * lane + 4)))
                        position = start + 16 * lane + 4 * quarter
                        self.store(four, out, self.times(self.sum(line, position), 4))


class OfPositions(PlaneFunction):
    """Sums over positions."""

    def units(self, sizes):
        rows = self.at.sdiv(sizes.bytes, self.long(planes.blocks(self.bits)))
        lines = self.sum(sizes.rows, 1)
        return rows, self.times(sizes.length, len(self.slabs), lines)

    def compute_units(self, arrays, sizes, start, stop):
        packed, x, starts, out = arrays
        count, _ = self.units(sizes)
        with self.loop(start, stop) as unit:
            batch, index = self.at.sdiv(unit, count), self.at.srem(unit, count)
            of_batch = self.times(batch, sizes.bytes)
            lines = [
                self.offset(
                    packed,
                    self.times(
                        self.sum(of_batch, self.times(count, block), index),
                        sizes.length,
                    ),
                )
                for block in range(planes.blocks(self.bits))
            ]

            def multiply(row: Any, together: int) -> None:
                first = self.sum(self.times(batch, sizes.rows), row)
                values = self.offset(x, self.times(first, sizes.products))
                totals = self._multiply(lines, values, sizes, together)
                for i, of_row in enumerate(totals):
                    raised = self.load(
                        starts, self.times(self.sum(first, i), 4), self.int, 4
                    )
                    line = self.times(self.sum(first, i), sizes.columns)
                    for slab, one in enumerate(of_row):
                        channel = self.sum(self.times(count, slab), index)
                        with self.any(channel, sizes.columns):
                            total = self.at.add(self.added(self.at.load(one)), raised)
                            self.store(
                                total, out, self.times(self.sum(line, channel), 4)
                            )

            self.by_rows(sizes.rows, max(1, 8 // len(self.slabs)), multiply)

    def _multiply(
        self, lines: Sequence[Any], x: Any, sizes: Sizes, rows: int
    ) -> list[list[Any]]:
        """The sums of some rows and of the channels that share bytes, as variables."""
        at = self.at
        totals = [[self.variable(self.ints) for _ in self.slabs] for _ in range(rows)]
        everything = [one for of_row in totals for one in of_row]
        for one in everything:
            at.store(self.constant(self.ints, 0), one)

        def factors(position: Any, mask: Any = None) -> list[tuple[Any, Any]]:
            blocks = [self.load(line, position, self.ints) for line in lines]
            slabs = self.unpacked(self.raised(blocks))
            found = []
            for row in range(rows):
                place = self.sum(self.times(sizes.products, row), position)
                factor = self.load(x, place, self.ints)
                factor = factor if mask is None else at.and_(factor, mask)
                found += [(value, factor) for value in slabs]
            return found

        count = at.sdiv(sizes.length, self.long(self.width))
        self.accumulate(
            everything, count, lambda step: factors(self.times(step, self.width))
        )
        # Positions that are no whole vector are read with those before them.
        left = at.srem(sizes.length, self.long(self.width))
        with self.any(0, left):
            last = at.sub(sizes.length, self.long(self.width))
            first = at.trunc(at.sub(self.long(self.width), left), self.byte)
            kind = self.ir.VectorType(self.byte, self.width)
            numbers = self.ir.Constant(kind, list(range(self.width)))
            is_new = at.icmp_unsigned(">=", numbers, self.splat(first, self.width))
            mask = at.bitcast(at.sext(is_new, kind), self.ints)
            self.add(everything, 1, lambda i: factors(last, mask))
        return totals


@functools.cache
def registered(kind: type[PlaneFunction], bits: int, instructions: Instructions) -> str:
    """Compiles a kernel, and returns the name of its custom call."""
    name = f"aqtlite_planes_{kind.__name__}_{bits}_{int(instructions)}"
    custom_call.register(name, kind(bits, instructions))
    return name

"""A kernel of int4 weights for x86-64.

It reads weights as they are stored, 8 rows of them at a time, one in each 32 bits of a
vector, and widens them in registers. `int4_products` calls it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from aqtlite.lowering.forms import custom_call
from aqtlite.lowering.forms.int4_rows import BLOCK, Memory, Rows, Sizes, products

LANES = 8
"""Number of rows of weights in a vector, and so of columns of the result."""

_ROWS = 16
"""Number of rows whose sums are kept beside the weights that are widened once."""

_ALIGN = 4 * LANES

_Sum = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled into a kernel."""

    digits: int
    """Number of digits of an element of the other operand."""

    is_scaled: bool
    """Whether sums are scaled and added over tiles, to float32, or returned as int32,
    of a single tile and digit."""

    is_single: bool
    """Whether a tile is a single block."""

    has_dots: bool
    """Whether the processor multiplies uint8 by int8 and adds four products (VNNI)."""


@functools.cache
def registered(kernel: Kernel) -> str:
    """Compiles a kernel, and returns the name of its custom call.

    Its arguments are the weights, int4 ``(columns, products)``; the other operand,
    ``(rows, products)``, int8, or float32 where there are several digits; and where
    sums are scaled, factors of the rows, float32 ``(rows, tiles)``, if they are of
    int8, and the scales of the weights, float32 ``(columns, tiles)``.
    """
    parts = map(int, dataclasses.astuple(kernel))
    name = "_".join(["aqtlite_int4", *map(str, parts)])
    custom_call.register(name, Int4Function(kernel))
    return name


class Int4Function(custom_call.Function):
    """Writes a kernel."""

    words = 10

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        super().__init__()

    def memory(self, frame):
        rows = Rows(self, self.kernel.digits, self.kernel.has_dots)
        return self.sum(*rows.bytes_of(self._sizes(frame)))

    def prepare(self, frame, state, memory):
        kernel, sizes = self.kernel, self._sizes(frame)
        weights, x = (self.data(self.argument(frame, i)) for i in range(2))
        out = self.result(frame)
        rows = Rows(self, kernel.digits, kernel.has_dots)
        of_values, of_offsets, _ = rows.bytes_of(sizes)
        offsets = self.offset(memory, of_values)
        units = self.offset(offsets, of_offsets)
        rows.lay_out(x, Memory(memory, offsets, units), sizes)
        scales = factors = self.null
        if kernel.is_scaled:
            is_float = kernel.digits > 1
            factors = units if is_float else self.data(self.argument(frame, 2))
            scales = self.data(self.argument(frame, 2 if is_float else 3))
        columns = self.size(out, 1)
        words = (weights, memory, offsets, factors, scales, self.data(out))
        sizes_of = (sizes.rows, columns, sizes.tiles, sizes.blocks)
        for i, value in enumerate((*words, *sizes_of)):
            self.store(value, state, 8 * i, 8)
        # Reading a weight takes about as long as some products.
        lines = self.sum(self.times(sizes.rows, kernel.digits), 2)
        return columns, self.times(sizes.tiles, sizes.blocks, lines, BLOCK)

    def _sizes(self, frame: Any) -> Sizes:
        rows, count = (self.size(self.argument(frame, 1), axis) for axis in (0, 1))
        tiles = self.long(1)
        if self.kernel.is_scaled:
            scales = self.argument(frame, 2 if self.kernel.digits > 1 else 3)
            tiles = self.size(scales, 1)
        return Sizes(rows, tiles, self.at.sdiv(count, self.times(tiles, BLOCK)))

    def compute(self, state, start, stop):
        at, digits = self.at, self.kernel.digits
        ir = self.ir
        self.float = ir.FloatType()
        self.bytes = ir.VectorType(self.byte, 4 * LANES)
        self.ints = ir.VectorType(self.int, LANES)
        self.floats = ir.VectorType(self.float, LANES)
        weights, x, offsets, factors, scales, out = (
            self.word(state, i, self.pointer) for i in range(6)
        )
        rows, columns, tiles, blocks = (self.word(state, 6 + i) for i in range(4))
        sums, totals = (
            self.array(self.ints, _ROWS * count, _ALIGN) for count in (digits, 1)
        )
        row_bytes = self.times(tiles, blocks, BLOCK // 2)
        # Columns that are no whole vector are computed with those before them.
        last = at.sub(columns, self.long(LANES))
        with self.loop(0, rows, _ROWS) as row:
            count = self.least(at.sub(rows, row), _ROWS)
            lines = self.times(count, digits)
            with self.loop(start, stop, LANES) as index:
                column = self.least(index, last)
                weight = self.offset(weights, self.times(column, row_bytes))
                with self.loop(0, tiles) as tile:
                    before = self.sum(self.times(tile, rows), row)
                    offset = self.offset(offsets, self.times(before, 4 * digits))

                    def read(block: Any) -> tuple[list[Any], Any]:
                        step = self.sum(self.times(tile, blocks), block)
                        where = self.offset(weight, self.times(step, BLOCK // 2))
                        line = self.sum(self.times(step, rows), row)
                        line = self.offset(x, self.times(line, digits * BLOCK))
                        return self._widened(where, row_bytes), line

                    sum_of = self._sums(sums, read, offset, lines, blocks)
                    if self.kernel.is_scaled:
                        first = self.sum(self.times(row, tiles), tile)
                        factor = self.offset(factors, self.times(first, 4))
                        scale = self._scale(scales, column, tile, tiles)
                        self._accumulate(
                            totals, sum_of, scale, (factor, tiles), count, tile
                        )
                found = totals if self.kernel.is_scaled else sums
                with self.loop(0, count) as i:
                    place = self.times(self.sum(row, i), columns)
                    place = self.times(self.sum(place, column), 4)
                    self.store(self._get(found, i), out, place, 4)

    def _sums(
        self, sums: Any, read: Callable[..., Any], offset: Any, lines: Any, blocks: Any
    ) -> _Sum:
        """Sums the products of a tile, and returns a function to the sums of a line."""
        if self.kernel.is_single:
            wide, x = read(0)
            return lambda i: self._products(self._offset(offset, i), wide, x, i)
        with self.loop(0, lines) as i:
            self._put(sums, i, self._offset(offset, i))
        with self.loop(0, blocks) as block:
            wide, x = read(block)
            with self.loop(0, lines) as i:
                total = self._products(self._get(sums, i), wide, x, i)
                self._put(sums, i, total)
        return functools.partial(self._get, sums)

    def _get(self, array: Any, index: Any) -> Any:
        return self.load(array, self.times(index, _ALIGN), self.ints, _ALIGN)

    def _put(self, array: Any, index: Any, value: Any) -> None:
        value = self.at.bitcast(value, self.ints)
        self.store(value, array, self.times(index, _ALIGN), _ALIGN)

    def _offset(self, offsets: Any, line: Any) -> Any:
        """What raising the weights adds to the sums of a line, negated."""
        return self._splat(self.load(offsets, self.times(line, 4), self.int, 4))

    def _splat(self, value: Any) -> Any:
        return self.splat(value, LANES)

    def _widened(self, weights: Any, row_bytes: Any) -> list[Any]:
        """Reads a block of `LANES` rows of weights.

        Returns:
            Vectors of uint8, larger by 8 than the weights, with four of a row in each
            32 bits: of each eight, those of even and of odd positions.
        """
        at, quad = self.at, self.ir.VectorType(self.int, 4)
        rows = [
            self.load(weights, self.times(row_bytes, i), quad) for i in range(LANES)
        ]
        # Rows i and i + 4 in one vector, then transposed within both halves.
        both = [self.shuffled(rows[i], list(range(8)), rows[i + 4]) for i in range(4)]
        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        a, b = (self.shuffled(both[0], order, both[1]) for order in (low, high))
        c, d = (self.shuffled(both[2], order, both[3]) for order in (low, high))
        first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        columns = [
            self.shuffled(one, order, other)
            for one, other in ((a, c), (b, d))
            for order in (first, second)
        ]
        signs, mask, four = (
            self.ir.Constant(self.ints, [value] * LANES)
            for value in (0x88888888, 0x0F0F0F0F, 4)
        )
        wide = []
        for column in columns:
            raised = at.xor(column, signs)
            wide += [at.and_(raised, mask), at.and_(at.lshr(raised, four), mask)]
        return [at.bitcast(one, self.bytes) for one in wide]

    def _products(self, total: Any, wide: list[Any], x: Any, line: Any) -> Any:
        """Adds the products of a block with a line of the other operand."""
        each = self.offset(x, self.times(line, BLOCK))
        others = [
            self.at.bitcast(
                self._splat(self.load(each, 4 * i, self.int, 4)), self.bytes
            )
            for i in range(len(wide))
        ]
        pairs = list(zip(wide, others, strict=True))
        return products(self, self.kernel.has_dots, total, pairs)

    def _scale(self, scales: Any, column: Any, tile: Any, tiles: Any) -> Any:
        """The scales of a tile of `LANES` rows of weights."""
        out = self.ir.Constant(self.floats, self.ir.Undefined)
        for lane in range(LANES):
            place = self.sum(self.times(self.sum(column, lane), tiles), tile)
            scale = self.load(scales, self.times(place, 4), self.float, 4)
            out = self.at.insert_element(out, scale, self.int(lane))
        return out

    def _accumulate(
        self,
        totals: Any,
        sum_of: _Sum,
        scale: Any,
        factors: tuple[Any, Any],
        count: Any,
        tile: Any,
    ) -> None:
        """Scales the sums of a tile, and adds them to the totals in float32.

        LLVM is not allowed to contract products and sums.
        """
        at, digits = self.at, self.kernel.digits
        is_first = at.icmp_signed("==", tile, self.long(0))
        with self.loop(0, count) as row:
            first = self.times(row, digits)
            parts = [
                at.sitofp(sum_of(self.sum(first, i)), self.floats)
                for i in range(digits)
            ]
            total, base = parts[-1], self.ir.Constant(self.floats, [256.0] * LANES)
            for part in reversed(parts[:-1]):
                total = at.fadd(at.fmul(total, base), part)
            pointer, stride = factors
            place = self.times(row, stride, 4)
            factor = self.load(pointer, place, self.float, 4)
            ordered = scale, self._splat(factor)
            for one in ordered if digits == 1 else reversed(ordered):
                total = at.fmul(total, one)
            before = at.bitcast(self._get(totals, row), self.floats)
            total = at.select(is_first, total, at.fadd(before, total))
            self._put(totals, row, total)

"""The operand beside the weights, laid out for their kernel: rows of int8 or floats.

Floats become the digits of `digits.of_floats`, with a unit for each tile of a row, or
integers of a `Grid`, with a scale for each row, by the same arithmetic. XLA would take
several kernels for it, and one byte at a time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.lowering.digits import BITS
from aqtlite.lowering.forms import custom_call
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.row_grid import Grid

BLOCK = 32
"""Least number of products that are summed before the sums are widened
(`Instructions.block`)."""

TRANSPOSED = 16
"""Number of rows that are transposed at a time, where they lie as columns."""

# As nibbles and bytes are widened: of each eight or four elements the even ones, then
# the odd ones.
_ORDER, _ORDER_OF_INT16 = (0, 2, 4, 6, 1, 3, 5, 7), (0, 2, 1, 3)

_MAGNITUDE, _INFINITY, _MANTISSA = 0x7FFFFFFF, 0x7F800000, 23

_ONE, _NAN = 0x3F800000, 0x7FC00000

_TINY = np.finfo(np.float32).tiny

# See `exact.nearest_integer`.
_ANCHOR = 1.5 * 2.0**23
_ANCHOR_BITS = 0x4B400000


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Values of a call."""

    rows: Any
    tiles: Any
    blocks: Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Pointers to what is written."""

    values: Any
    """int8 or int16, ``(tiles, blocks, rows, lines, block)``: a line for each part of a
    number, which is a digit, or the two highest as an int16."""

    offsets: Any
    """Sums of values, times what weights are raised by, negated: int32, ``(tiles, rows,
    lines)``."""

    units: Any
    """Units of the digits of floats, float32, ``(rows, tiles)``.

    Of rows that are rounded to a grid, their own scales. Of rows of a given scale, 1,
    or NaN where the first or the last element is not finite."""


class Rows:
    """Writes the instructions that lay out rows ``(rows, tiles * blocks * block)``."""

    def __init__(
        self,
        function: custom_call.Function,
        bits: int,
        digits: int,
        instructions: Instructions,
        raised_by: int,
        grid: Grid | None = None,
    ):
        self.f, self.digits, self.instructions = function, digits, instructions
        self.grid, self.are_floats = grid, digits > 1 or grid is not None
        self.parts = instructions.parts(bits)
        self.lines = instructions.numbers(digits) * self.parts
        self.block = instructions.block
        self.line_size = self.block * instructions.number_size
        order: Sequence[int] = _ORDER if bits == 4 else range(self.block)
        self.raised_by = raised_by
        if instructions.takes_int16:
            order, self.raised_by = _ORDER_OF_INT16, 0
        starts = range(0, self.block, len(order))
        self.order = [start + place for start in starts for place in order]
        ir = function.ir
        self.ints, self.floats, self.bytes = (
            ir.VectorType(kind, self.block)
            for kind in (function.int, ir.FloatType(), function.byte)
        )
        self.shorts = ir.VectorType(ir.IntType(16), self.block)
        self.sums = ir.VectorType(function.int, self.block // 4)

    def bytes_of(self, sizes: Sizes) -> tuple[Any, Any, Any]:
        """The sizes of `Memory`."""
        f, count = self.f, self.f.times(sizes.rows, sizes.tiles)
        return (
            f.times(count, sizes.blocks, self.line_size * self.lines),
            f.times(count, 4 * self.lines),
            f.times(count, 4),
        )

    def memory_from(self, memory: Memory, row: Any, sizes: Sizes) -> Memory:
        """Returns pointers to what is written of a row and those behind it."""
        before = self.bytes_of(dataclasses.replace(sizes, rows=row))
        values, offsets, units = (
            self.f.offset(start, size)
            for start, size in zip(
                (memory.values, memory.offsets, memory.units), before, strict=True
            )
        )
        return Memory(values, offsets, units)

    def lay_out(self, x: Any, memory: Memory, sizes: Sizes, scale: Any = None) -> None:
        """Writes values, offsets and, of floats, units.

        Args:
            x: pointer to the first of the rows.
            memory: what is written.
            sizes: values of the call.
            scale: scale of all rows; None if each has its own, or is not rounded.
        """
        f, lines = self.f, self.lines
        sums = f.array(self.sums, lines, self.block)
        bound = f.array(self.ints, 1, self.block)
        size = self.block * (4 if self.are_floats else 1)
        with f.loop(0, sizes.rows) as row, f.loop(0, sizes.tiles) as tile:
            line = f.sum(f.times(row, sizes.tiles), tile)
            start = f.offset(x, f.times(line, sizes.blocks, size))
            unit = reciprocal = None
            if scale is not None:
                unit = self._of_ends(start, f.times(sizes.blocks, size))
                reciprocal = self._reciprocal(scale)
            elif self.are_floats:
                largest = self._largest(start, bound, sizes.blocks)
                find = self._unit if self.grid is None else self._scale
                unit, reciprocal = find(largest)
            if unit is not None:
                f.store(unit, memory.units, f.times(line, 4), 4)
            self._start(sums, self.raised_lines)
            with f.loop(0, sizes.blocks) as block:
                each = f.offset(start, f.times(block, size))
                step = f.sum(f.times(tile, sizes.blocks), block)
                place = f.sum(f.times(step, sizes.rows), row)
                place = f.times(place, lines, self.line_size)
                parts = self._lines(self._numbers(each, reciprocal))
                self._store(parts, memory.values, place, sums)
            place = f.times(f.sum(f.times(tile, sizes.rows), row), 4 * lines)
            self._finish(sums, memory.offsets, place)

    def lay_out_columns(self, x: Any, count: Any, memory: Memory, sizes: Sizes) -> None:
        """Writes values and offsets of int8 of a single tile, ``(products, rows)``.

        Args:
            x: pointer to the first of the rows.
            count: number of all rows, by which products lie apart.
            memory: what is written.
            sizes: values of the call; its rows are a multiple of `TRANSPOSED`.
        """
        f, lines = self.f, self.lines
        kind = f.ir.VectorType(f.byte, TRANSPOSED)
        transposed = f.array(self.bytes, TRANSPOSED, BLOCK)
        all_sums = f.array(self.sums, TRANSPOSED * lines, BLOCK)
        with f.loop(0, sizes.rows, TRANSPOSED) as first:
            self._start(all_sums, TRANSPOSED * lines)
            with f.loop(0, sizes.blocks) as block:
                start = f.offset(x, f.sum(f.times(block, BLOCK, count), first))
                read = [f.load(start, f.times(count, i), kind) for i in range(BLOCK)]
                for i, one in enumerate(_transposed(f, read)):
                    f.store(one, transposed, BLOCK * i, BLOCK)
                with f.loop(0, TRANSPOSED) as row:
                    place = f.sum(f.times(block, sizes.rows), first, row)
                    place = f.times(place, lines, BLOCK)
                    one = f.load(transposed, f.times(row, BLOCK), self.bytes, BLOCK)
                    sums = f.offset(all_sums, f.times(row, lines, BLOCK))
                    self._store(self._lines([one]), memory.values, place, sums)
            with f.loop(0, TRANSPOSED) as row:
                sums = f.offset(all_sums, f.times(row, lines, BLOCK))
                place = f.times(f.sum(first, row), 4 * lines)
                self._finish(sums, memory.offsets, place)

    def _start(self, sums: Any, count: int) -> None:
        zero = self.f.constant(self.sums, 0)
        for i in range(count):
            self.f.store(zero, sums, self.block * i, self.block)

    def _store(self, parts: list[Any], values: Any, place: Any, sums: Any) -> None:
        """Writes lines of a block, and adds them to their sums."""
        f = self.f
        for i, part in enumerate(parts):
            f.store(part, values, f.sum(place, self.line_size * i))
        for i in range(self.raised_lines):
            total = f.load(sums, self.block * i, self.sums, self.block)
            f.store(self._added(total, parts[i]), sums, self.block * i, self.block)

    def _finish(self, sums: Any, offsets: Any, place: Any) -> None:
        """Writes the offsets of lines, of their sums."""
        f = self.f
        for i in range(self.raised_lines):
            total = f.load(sums, self.block * i, self.sums, self.block)
            total = f.call(
                f"llvm.vector.reduce.add.v{self.sums.count}i32", f.int, total
            )
            total = f.at.mul(total, f.int(-self.raised_by))
            f.store(total, offsets, f.sum(place, 4 * i), 4)

    @property
    def raised_lines(self) -> int:
        """The number of lines that are multiplied by raised weights."""
        return self.lines if self.raised_by else 0

    def _largest(self, start: Any, bound: Any, blocks: Any) -> Any:
        """The bits of the largest magnitude of a tile."""
        f = self.f
        f.store(f.constant(self.ints, 0), bound, 0, self.block)
        with f.loop(0, blocks) as block:
            bits = f.load(start, f.times(block, 4 * self.block), self.ints)
            bits = f.at.and_(bits, f.constant(self.ints, _MAGNITUDE))
            before = f.load(bound, 0, self.ints, self.block)
            largest = f.call(f"llvm.smax.v{self.block}i32", self.ints, before, bits)
            f.store(largest, bound, 0, self.block)
        largest = f.load(bound, 0, self.ints, self.block)
        return f.call(f"llvm.vector.reduce.smax.v{self.block}i32", f.int, largest)

    def _unit(self, bits: Any) -> tuple[Any, Any]:
        """The unit, NaN where an element is not finite, and its reciprocal."""
        f, at = self.f, self.f.at
        is_finite = at.icmp_signed("<", bits, f.int(_INFINITY))
        bits = f.call("llvm.smin.i32", f.int, bits, f.int(_INFINITY))
        exponent = at.ashr(at.add(bits, f.int((1 << _MANTISSA) - 1)), f.int(_MANTISSA))
        exponent = at.sub(exponent, f.int(BITS * self.digits - 2))
        exponent = f.call("llvm.smax.i32", f.int, exponent, f.int(1))
        exponent = f.call("llvm.smin.i32", f.int, exponent, f.int(253))
        unit = at.shl(exponent, f.int(_MANTISSA))
        reciprocal = at.shl(at.sub(f.int(254), exponent), f.int(_MANTISSA))
        unit = at.select(is_finite, unit, f.int(_NAN))
        return unit, f.splat(at.bitcast(reciprocal, f.ir.FloatType()), self.block)

    def _scale(self, bits: Any) -> tuple[Any, Any]:
        """The scale, NaN where an element is not finite, and its reciprocal.

        The arithmetic is that of `calibration.scale_from_bound`.
        """
        f, at, kind = self.f, self.f.at, self.f.ir.FloatType()
        assert self.grid is not None and self.grid.own_scales is not None
        how = self.grid.own_scales
        tiny, factor, of_zeros = (
            f.ir.Constant(kind, float(value))
            for value in (_TINY, how.factor, how.of_zeros)
        )
        is_finite = at.icmp_signed("<", bits, f.int(_INFINITY))
        largest = at.bitcast(at.select(is_finite, bits, f.int(_NAN)), kind)
        scale = at.fmul(largest, factor)
        scale = at.select(at.fcmp_ordered("<", scale, tiny), of_zeros, scale)
        return scale, self._reciprocal(scale)

    def _of_ends(self, start: Any, size: Any) -> Any:
        """1, or NaN where the first or the last float of a row is not finite."""
        f, at = self.f, self.f.at
        ends = (f.load(start, place, f.int) for place in (0, f.sum(size, -4)))
        magnitudes = (at.and_(end, f.int(_MAGNITUDE)) for end in ends)
        largest = f.call("llvm.smax.i32", f.int, *magnitudes)
        is_finite = at.icmp_signed("<", largest, f.int(_INFINITY))
        return at.select(is_finite, f.int(_ONE), f.int(_NAN))

    def _reciprocal(self, scale: Any) -> Any:
        one = self.f.ir.Constant(scale.type, 1.0)
        return self.f.splat(self.f.at.fdiv(one, scale), self.block)

    def _lines(self, numbers: list[Any]) -> list[Any]:
        """The parts of the numbers of a block, lowest first, as weights are ordered."""
        ordered = [self.f.shuffled(one, self.order) for one in numbers]
        if self.parts == 1:
            return ordered
        return [half for one in ordered for half in self._halves(one)]

    def _halves(self, x: Any) -> tuple[Any, Any]:
        """Splits ``low + 16 * high``: -8 to 7, and -8 to 8."""
        f, at = self.f, self.f.at
        four, three, one = (f.constant(self.bytes, n) for n in (4, 3, 1))
        low = at.ashr(at.shl(x, four), four)
        is_negative = at.and_(at.lshr(x, three), one)
        return low, at.add(at.ashr(x, four), is_negative)

    def _numbers(self, x: Any, reciprocal: Any) -> list[Any]:
        """The numbers of a block, lowest first: digits, or the two highest as one."""
        f, at = self.f, self.f.at
        if reciprocal is None:
            return [f.load(x, 0, self.bytes)]
        scaled = at.fmul(f.load(x, 0, self.floats), reciprocal)
        if self.grid is not None:
            scaled = self._clipped(scaled, self.grid.largest)
        anchored = at.fadd(scaled, f.constant(self.floats, _ANCHOR))
        rest = at.sub(
            at.bitcast(anchored, self.ints), f.constant(self.ints, _ANCHOR_BITS)
        )
        out, left = [], f.constant(self.ints, 32 - BITS)
        for _ in range(self.instructions.numbers(self.digits) - 1):
            low = at.ashr(at.shl(rest, left), left)
            out.append(low)
            rest = at.ashr(at.sub(rest, low), f.constant(self.ints, BITS))
        kind = self.shorts if self.instructions.takes_int16 else self.bytes
        return [at.trunc(one, kind) for one in (*out, rest)]

    def _clipped(self, x: Any, largest: int) -> Any:
        """Clips floats; NaN stays NaN, whose lowest byte is taken, as in XLA's form."""
        at = self.f.at
        for sign, order in ((-1, "<"), (1, ">")):
            bound = self.f.constant(self.floats, float(sign * largest))
            x = at.select(at.fcmp_ordered(order, x, bound), bound, x)
        return x

    def _added(self, total: Any, part: Any) -> Any:
        f, how = self.f, self.instructions.products
        ones, part = f.constant(self.sums, 0x01010101), f.at.bitcast(part, self.sums)
        return how.finished(f, total, how.multiplied(f, how.started(total), ones, part))


def _transposed(f: custom_call.Function, products: list[Any]) -> list[Any]:
    """Transposes `BLOCK` vectors of `TRANSPOSED` bytes: a vector for each byte."""
    # Both halves of the products side by side, then interleaved within each of them.
    pairs = zip(products[:TRANSPOSED], products[TRANSPOSED:], strict=True)
    both = [f.shuffled(low, list(range(BLOCK)), high) for low, high in pairs]
    half = TRANSPOSED // 2
    first, second = (
        [
            start + i + other
            for start in (0, TRANSPOSED)
            for i in range(begin, begin + half)
            for other in (0, BLOCK)
        ]
        for begin in (0, half)
    )
    for _ in range(TRANSPOSED.bit_length() - 1):
        pairs = zip(both[:half], both[half:], strict=True)
        both = [f.shuffled(a, order, b) for a, b in pairs for order in (first, second)]
    return both

"""A kernel of int4 weights for x86-64.

It takes a panel of weights at a time (`int4_panels`), widens them in registers, and
multiplies them with as many rows of the other operand as there are registers for sums.
`int4_products` calls it.
"""

import dataclasses
import functools
import itertools
from typing import Any

from aqtlite.lowering import custom_call, int4_panels
from aqtlite.lowering.int4_panels import PANEL
from aqtlite.lowering.int4_rows import BLOCK, Memory, Rows, Sizes
from aqtlite.lowering.products_of_bytes import Instructions

_QUARTERS = BLOCK // 8
"""Number of words of a row of weights in a block."""

_LATENCY = 4
"""Number of sums that do not wait for each other."""


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

    is_packed: bool
    """Whether the weights are in panels."""

    instructions: Instructions


@functools.cache
def registered(kernel: Kernel) -> str:
    """Compiles a kernel, and returns the name of its custom call.

    Its arguments are the weights, int4 ``(columns, products)`` or `int4_panels`; the
    other operand, ``(rows, products)``, int8, or float32 where there are several
    digits; and where sums are scaled, factors of the rows, float32 ``(rows, tiles)``,
    if they are of int8, and the scales of the weights, float32 ``(columns, tiles)``.
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
        return self.sum(*self._rows().bytes_of(self._sizes(frame)))

    def prepare(self, frame, state, memory):
        kernel, sizes = self.kernel, self._sizes(frame)
        weights, x = (self.data(self.argument(frame, i)) for i in range(2))
        out, rows = self.result(frame), self._rows()
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
        # Reading a weight takes about as long as a product.
        lines = self.sum(self.times(sizes.rows, kernel.digits), 1)
        return columns, self.times(sizes.tiles, sizes.blocks, lines, BLOCK)

    def _rows(self) -> Rows:
        return Rows(self, self.kernel.digits, self.kernel.instructions)

    def _sizes(self, frame: Any) -> Sizes:
        rows, count = (self.size(self.argument(frame, 1), axis) for axis in (0, 1))
        tiles = self.long(1)
        if self.kernel.is_scaled:
            scales = self.argument(frame, 2 if self.kernel.digits > 1 else 3)
            tiles = self.size(scales, 1)
        return Sizes(rows, tiles, self.at.sdiv(count, self.times(tiles, BLOCK)))

    def compute(self, state, start, stop):
        at, kernel = self.at, self.kernel
        weights, x, offsets, factors, scales, out = (
            self.word(state, i, self.pointer) for i in range(6)
        )
        rows, columns, tiles, blocks = (self.word(state, 6 + i) for i in range(4))
        row_bytes = self.times(tiles, blocks, BLOCK // 2)
        of_panel = self.times(row_bytes, 0 if kernel.is_packed else PANEL)
        memory = self.call(
            "malloc", self.pointer, self.sum(of_panel, self.times(tiles, 4 * PANEL))
        )
        own = self.offset(memory, of_panel)
        # Columns that are no whole panel are computed with those before them.
        last = at.sub(columns, self.long(PANEL))
        with self.loop(start, stop, PANEL) as index:
            column = self.least(index, last)
            if kernel.is_packed:
                panel = self.offset(weights, self.times(index, row_bytes))
            else:
                panel = memory
                first = self.offset(weights, self.times(column, row_bytes))
                words = at.sdiv(row_bytes, self.long(int4_panels.WORD))
                int4_panels.lay_out(self, first, words, panel, int4_panels.SIGNS)
            if kernel.is_scaled:
                first = self.offset(scales, self.times(column, tiles, 4))
                int4_panels.lay_out(self, first, tiles, own)
            place = self.offset(out, self.times(column, 4))
            values = _Values(panel, own, x, offsets, factors, place)
            sizes = Sizes(rows, tiles, blocks)
            done = self.long(0)
            for count in kernel.instructions.rows_at_once(kernel.digits):
                left = at.sub(rows, done)
                whole = at.sub(left, at.srem(left, self.long(count)))
                after = self.sum(done, whole)
                with at.if_then(at.icmp_signed("<", done, after)):
                    with self.loop(done, after, count) as row:
                        self._compute_rows(values, sizes, columns, row, count)
                done = after
        self.call("free", self.none, memory)

    def _compute_rows(
        self, of: "_Values", sizes: Sizes, columns: Any, row: Any, count: int
    ) -> None:
        """Computes a panel of columns of some rows."""
        at, kernel, how = self.at, self.kernel, self.kernel.instructions
        lines, parts = count * kernel.digits, range(how.vectors)
        copies = range(max(1, _LATENCY // (lines * len(parts)) if how.has_dots else 1))
        sums = [
            [[self.variable(how.ints(self)) for _ in copies] for _ in parts]
            for _ in range(lines)
        ]
        kind = how.floats(self)
        totals = [
            [self.variable(kind) for _ in parts]
            for _ in range(count if kernel.is_scaled else 0)
        ]
        for one in itertools.chain(*totals):
            # Unlike zero, it changes no term that is added to it.
            at.store(self.constant(kind, -0.0), one)
        with self.loop(0, sizes.tiles) as tile:
            before = self.times(
                self.sum(self.times(tile, sizes.rows), row), kernel.digits
            )
            for i, of_line in enumerate(sums):
                place = self.times(self.sum(before, i), 4)
                # What raising the weights adds, negated.
                offset = self.load(of.offsets, place, self.int, 4)
                for first, *others in of_line:
                    self.at.store(self.splat(offset, how.lanes), first)
                    for other in others:
                        self.at.store(self.constant(how.ints(self), 0), other)

            def add(block: Any, tile: Any = tile) -> None:
                step = self.sum(self.times(tile, sizes.blocks), block)
                weights = self.offset(of.panel, self.times(step, PANEL * BLOCK // 2))
                line = self.times(
                    self.sum(self.times(step, sizes.rows), row), kernel.digits, BLOCK
                )
                self._add_products(sums, weights, self.offset(of.x, line))

            if kernel.is_single:
                add(self.long(0))
            else:
                with self.loop(0, sizes.blocks) as block:
                    add(block)
            if kernel.is_scaled:
                self._accumulate(of, sizes, totals, sums, row, tile)
        found = totals if kernel.is_scaled else [[one for (one, *_) in sums[0]]]
        if not kernel.is_scaled:
            found = sums
        for i in range(count):
            line = self.times(self.sum(row, i), columns, 4)
            for j in parts:
                one = found[i][j]
                value = (
                    self._sum_of(one) if isinstance(one, list) else self.at.load(one)
                )
                self.store(value, of.out, self.sum(line, 4 * how.lanes * j))

    def _add_products(self, sums: Any, weights: Any, x: Any) -> None:
        """Adds the products of a block of weights with lines of the other operand."""
        how, at, kind = (
            self.kernel.instructions,
            self.at,
            self.kernel.instructions.ints(self),
        )
        before = [[[at.load(one) for one in of] for of in line] for line in sums]
        parts = [[[how.started(one) for one in of] for of in line] for line in before]
        mask, four = (self.constant(kind, value) for value in (0x0F0F0F0F, 4))
        for i in range(_QUARTERS):
            words = [
                self.load(weights, PANEL * 4 * i + 4 * how.lanes * j, kind)
                for j in range(how.vectors)
            ]
            low = [at.and_(word, mask) for word in words]
            high = [at.and_(at.lshr(word, four), mask) for word in words]
            for k, wide in ((2 * i, low), (2 * i + 1, high)):
                for line, of_line in enumerate(parts):
                    place = BLOCK * line + 4 * k
                    other = self.splat(self.load(x, place, self.int, 4), how.lanes)
                    for one, of in zip(wide, of_line, strict=True):
                        copy = k % len(of)
                        of[copy] = how.multiplied(self, of[copy], one, other)
        for line, of_line in enumerate(parts):
            for j, of in enumerate(of_line):
                for copy, part in enumerate(of):
                    after = how.finished(self, before[line][j][copy], part)
                    at.store(after, sums[line][j][copy])

    def _sum_of(self, variables: list[Any]) -> Any:
        return functools.reduce(self.at.add, map(self.at.load, variables))

    def _accumulate(
        self,
        of: "_Values",
        sizes: Sizes,
        totals: Any,
        sums: Any,
        row: Any,
        tile: Any,
    ) -> None:
        """Scales the sums of a tile, and adds them to the totals in float32.

        LLVM is not allowed to contract products and sums.
        """
        at, digits, how = self.at, self.kernel.digits, self.kernel.instructions
        floats = how.floats(self)
        base = self.constant(floats, 256.0)
        for i, of_row in enumerate(totals):
            place = self.sum(self.times(self.sum(row, i), sizes.tiles), tile)
            factor = self.load(of.factors, self.times(place, 4), self.ir.FloatType(), 4)
            factor = self.splat(factor, how.lanes)
            for j, one in enumerate(of_row):
                parts = [
                    at.sitofp(self._sum_of(sums[i * digits + k][j]), floats)
                    for k in range(digits)
                ]
                total = parts[-1]
                for part in reversed(parts[:-1]):
                    # The product is exact, so that it may be contracted.
                    name = f"llvm.fmuladd.v{how.lanes}f32"
                    total = self.call(name, floats, total, base, part)
                place = self.sum(self.times(tile, 4 * PANEL), 4 * how.lanes * j)
                scale = self.load(of.scales, place, floats, 4)
                ordered = scale, factor
                for other in ordered if digits == 1 else reversed(ordered):
                    total = at.fmul(total, other)
                at.store(at.fadd(at.load(one), total), one)


@dataclasses.dataclass(frozen=True)
class _Values:
    """Pointers to what the columns of a panel are computed from, and to them."""

    panel: Any
    scales: Any
    x: Any
    offsets: Any
    factors: Any
    out: Any

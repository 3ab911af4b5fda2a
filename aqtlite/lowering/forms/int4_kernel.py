"""A kernel of int4 weights for x86-64.

It takes a panel of weights at a time (`int4_panels`), widens them in registers, and
multiplies them with as many rows of the other operand as there are registers for sums.
`int4_products` calls it.
"""

import dataclasses
import functools
from typing import Any

from aqtlite.lowering.forms import custom_call, int4_panels
from aqtlite.lowering.forms.int4_panels import PANEL
from aqtlite.lowering.forms.int4_rows import BLOCK, Memory, Rows, Sizes
from aqtlite.lowering.forms.int4_sums import Arrays, RowsOfPanel
from aqtlite.lowering.forms.products_of_bytes import Instructions


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
        sizes = Sizes(rows, tiles, blocks)
        row_bytes = self.times(tiles, blocks, BLOCK // 2)
        of_panel = self.times(row_bytes, PANEL)
        of_scales = self.times(tiles, 4 * PANEL)
        memory = own = self.null
        if not kernel.is_packed:
            memory = self.call("malloc", self.pointer, self.sum(of_panel, of_scales))
            own = self.offset(memory, of_panel)
        # Columns that are no whole panel are computed with those before them.
        last = at.sub(columns, self.long(PANEL))
        with self.loop(start, stop, PANEL) as index:
            column = self.least(index, last)
            if kernel.is_packed:
                panel = self.offset(weights, self.times(index, row_bytes))
                own = self.offset(scales, self.times(index, tiles, 4))
            else:
                panel = memory
                first = self.offset(weights, self.times(column, row_bytes))
                words = at.sdiv(row_bytes, self.long(int4_panels.WORD))
                int4_panels.lay_out(self, first, words, panel, int4_panels.SIGNS)
                if kernel.is_scaled:
                    first = self.offset(scales, self.times(column, tiles, 4))
                    int4_panels.lay_out(self, first, tiles, own)
            place = self.offset(out, self.times(column, 4))
            arrays = Arrays(panel, own, x, offsets, factors, place)
            done = self.long(0)
            for count in kernel.instructions.rows_at_once(kernel.digits):
                of = RowsOfPanel(self, kernel.instructions, kernel.digits, count)
                compute = of.compute_scaled if kernel.is_scaled else of.compute
                left = at.sub(rows, done)
                whole = at.sub(left, at.srem(left, self.long(count)))
                after = self.sum(done, whole)
                is_any = at.icmp_signed("<", done, after)
                with at.if_then(is_any), self.loop(done, after, count) as row:
                    compute(arrays, sizes, columns, row, kernel.is_single)
                done = after
        if not kernel.is_packed:
            self.call("free", self.none, memory)

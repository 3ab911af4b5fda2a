"""A kernel of int4 or int8 weights, or codes, for x86-64.

It takes a panel of weights at a time (`panels`), widens them in registers, and
multiplies them with as many rows of the other operand as there are registers for sums.
`panel_products` calls it.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from aqtlite.lowering.forms import custom_call, panel_amx, panels
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.forms.panel_amx import ManyRowsOfPanel
from aqtlite.lowering.forms.panel_rows import Memory, Rows, Sizes
from aqtlite.lowering.forms.panel_sums import Arrays, RowsOfPanel
from aqtlite.lowering.forms.panels import PANEL, WORD
from aqtlite.lowering.forms.weight_coding import Coding
from aqtlite.lowering.row_grid import Grid

_CACHE, _CACHE_OF_AVX2, _ROWS = 2**19, 2**18, 32
"""Bytes of the other operand that stay in the cache while panels are multiplied with
them, and the number of whose rows they are a multiple."""


class Layout(enum.IntEnum):
    """How weights lie in memory."""

    ROWS = 0
    """``(columns, products)``"""

    PANELS = 1
    """`panels`"""

    COLUMNS = 2
    """``(products, columns)``, of int8.

    If a call has an attribute, the other operand is ``(products, rows)``, too, with a
    multiple of `panel_rows.TRANSPOSED` rows: one kernel is compiled for the products of
    a layer and those of the gradient of its weights."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled into a kernel."""

    bits: int
    """Bits of a weight: 4 or 8."""

    instructions: Instructions

    digits: int = 1
    """Number of digits of an element of the other operand."""

    is_scaled: bool = False
    """Whether sums are scaled and added over tiles, to float32, or returned as int32,
    of a single tile and digit."""

    is_single: bool = False
    """Whether a tile is a single block."""

    carries: bool = False
    """Whether sums of digits are carried before they are scaled (`digits.rounded`)."""

    layout: Layout = Layout.PANELS
    """Layout of the weights."""

    has_packed_scales: bool = False
    """Whether the scales of the weights are in panels."""

    coding: Coding = Coding.INTEGERS
    """What the bits of a weight mean."""

    grid: Grid | None = None
    """Grid to which rows of floats are rounded; None for rows that are not."""


def registered(kernel: Kernel) -> str:
    """Compiles a kernel, and returns the name of its custom call.

    Its arguments are the weights; the other operand, ``(rows, products)`` (see
    `Layout.COLUMNS`), int8, or float32 where there are several digits or a grid; and
    where sums are scaled, factors of the rows, float32 ``(rows, tiles)``, if they are
    of int8, and the scales of the weights, float32 ``(columns, tiles)``, or in
    `panels`. With a grid, `Memory.units` are a second result, float32 ``(rows, 1)``;
    for a grid without scales of its own, a scale of one element is a third argument.
    """
    parts = dict(vars(kernel))
    grid, instructions = parts.pop("grid"), parts.pop("instructions")
    numbers = map(int, (*parts.values(), instructions))
    name = "_".join(["aqtlite_panels", *map(str, numbers)])
    if grid is not None:
        own = () if grid.own_scales is None else vars(grid.own_scales).values()
        name = "_".join([name, *map(str, (grid.largest, *own))])
    custom_call.register(name, lambda: PanelFunction(kernel))
    return name


class PanelFunction(custom_call.Function):
    """Writes a kernel."""

    words = 10

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        super().__init__()

    def memory(self, frame):
        beyond = panel_amx.BEYOND if self._has_amx else 0
        return self.sum(*self._rows().bytes_of(self._sizes(frame)), beyond)

    def prepare(self, frame, state, memory):
        kernel, sizes = self.kernel, self._sizes(frame)
        weights, x = (self.data(self.argument(frame, i)) for i in range(2))
        out, rows = self.result(frame), self._rows()
        of_values, of_offsets, _ = rows.bytes_of(sizes)
        offsets = self.offset(memory, of_values)
        units = self.offset(offsets, of_offsets)
        scale = None
        if kernel.grid is not None:
            units = self.data(self.result(frame, 1))
            if kernel.grid.own_scales is None:
                given = self.data(self.argument(frame, 2))
                scale = self.load(given, 0, self.ir.FloatType(), 4)
        laid_out = Memory(memory, offsets, units)
        products = self.times(sizes.tiles, sizes.blocks, self._block)
        is_float = rows.are_floats
        size = self.times(products, 4 if is_float else 1)
        with self.loop(0, sizes.rows, self._together(sizes)) as first:
            there = rows.memory_from(laid_out, first, sizes)
            if kernel.layout is Layout.COLUMNS:
                self._lay_out_either(frame, first, size, there, sizes)
            else:
                start = self.offset(x, self.times(first, size))
                rows.lay_out(start, there, self._from_row(first, sizes), scale)
        scales, factors = self.null, units
        if kernel.is_scaled:
            scales = self.data(self.argument(frame, 2 if is_float else 3))
            if not is_float:
                factors = self.data(self.argument(frame, 2))
        columns = self.size(out, 1)
        words = (weights, memory, offsets, factors, scales, self.data(out))
        sizes_of = (sizes.rows, columns, sizes.tiles, sizes.blocks)
        for i, value in enumerate((*words, *sizes_of)):
            self.store(value, state, 8 * i, 8)
        # Reading a weight takes about as long as a product.
        lines = self.sum(self.times(sizes.rows, rows.lines), 1)
        return columns, self.times(products, lines)

    def _lay_out_either(
        self, frame: Any, first: Any, size: Any, memory: Memory, sizes: Sizes
    ) -> None:
        """Lays out rows, from a first one on, of int8 that may be transposed."""
        start, rows = self.data(self.argument(frame, 1)), self._rows()
        together = self._from_row(first, sizes)
        is_transposed = self.at.icmp_signed(
            ">", self.attribute_count(frame), self.long(0)
        )
        with self.at.if_else(is_transposed) as (then, otherwise):
            with then:
                place = self.offset(start, first)
                rows.lay_out_columns(place, sizes.rows, memory, together)
            with otherwise:
                place = self.offset(start, self.times(first, size))
                rows.lay_out(place, memory, together)

    @property
    def _has_amx(self) -> bool:
        return self.kernel.instructions is Instructions.AMX

    @property
    def _block(self) -> int:
        return self.kernel.instructions.block

    def _rows(self) -> Rows:
        of = self.kernel
        raised_by = of.coding.raised_by(of.bits)
        return Rows(self, of.bits, of.digits, of.instructions, raised_by, of.grid)

    def _sizes(self, frame: Any) -> Sizes:
        if self.kernel.layout is Layout.COLUMNS:
            arrays = self.result(frame), self.argument(frame, 0)
            rows, count = (self.size(array, 0) for array in arrays)
        else:
            rows, count = (self.size(self.argument(frame, 1), axis) for axis in (0, 1))
        tiles = self.long(1)
        if self.kernel.is_scaled:
            scales = self.argument(frame, 2 if self.kernel.digits > 1 else 3)
            tiles = self.size(scales, 1)
        return Sizes(rows, tiles, self.at.sdiv(count, self.times(tiles, self._block)))

    def _together(self, sizes: Sizes) -> Any:
        """The number of rows that are laid out together, and multiplied by a panel.

        Of more rows, values would leave the cache before the next panel.
        """
        rows = self._rows()
        of_row = self.times(sizes.tiles, sizes.blocks, rows.line_size * rows.lines)
        cache = _CACHE if self.kernel.instructions.has_dots else _CACHE_OF_AVX2
        times = self.at.sdiv(self.long(cache // _ROWS), of_row)
        return self.times(self.sum(times, 1), _ROWS)

    def _from_row(self, first: Any, sizes: Sizes) -> Sizes:
        """The sizes of the rows from a first one on that are laid out together."""
        left = self.at.sub(sizes.rows, first)
        count = self.least(left, self._together(sizes))
        return Sizes(count, sizes.tiles, sizes.blocks)

    def compute(self, state, start, stop):
        kernel = self.kernel
        weights, values, offsets, factors, scales, out = (
            self.word(state, i, self.pointer) for i in range(6)
        )
        rows, columns, tiles, blocks = (self.word(state, 6 + i) for i in range(4))
        memory, sizes = Memory(values, offsets, factors), Sizes(rows, tiles, blocks)
        row_bytes = self.times(tiles, blocks, self._block * kernel.bits // 8)
        own = own_scales = wide = self.null
        is_packed = kernel.layout is Layout.PANELS
        lays_out_scales = kernel.is_scaled and not kernel.has_packed_scales
        if not is_packed or lays_out_scales:
            of_scales = self.times(tiles, 4 * PANEL)
            of_panel = self.times(row_bytes, 0 if is_packed else PANEL)
            own_scales = self.call(
                "malloc", self.pointer, self.sum(of_scales, of_panel)
            )
            own = self.offset(own_scales, of_scales)
        if self._widens:  # To twice the bits.
            wide = self.call("malloc", self.pointer, self.times(row_bytes, 2 * PANEL))
        # Columns that are no whole panel are computed with those before them.
        last = self.at.sub(columns, self.long(PANEL))
        with (
            self._registers(),
            self.loop(0, rows, self._together(sizes)) as first,
            self.loop(start, stop, PANEL) as index,
        ):
            column = self.least(index, last)
            row = index if is_packed else column
            each = 1 if kernel.layout is Layout.COLUMNS else row_bytes
            panel = self.offset(weights, self.times(row, each))
            if not is_packed:
                words = self.at.sdiv(row_bytes, self.long(WORD))
                if kernel.layout is Layout.ROWS:
                    panels.lay_out(self, panel, words, own, panels.SIGNS[kernel.bits])
                else:
                    panels.lay_out_columns(self, panel, columns, words, own)
                panel = own
            row = index if kernel.has_packed_scales else column
            of_panel = self.offset(scales, self.times(row, tiles, 4))
            following = None
            if lays_out_scales:
                panels.lay_out(self, of_panel, tiles, own_scales)
                following = self.offset(of_panel, self.times(tiles, 4 * PANEL))
                of_panel = own_scales
            place = self.sum(self.times(first, columns), column)
            here = self._rows().memory_from(memory, first, sizes)
            place = self.offset(out, self.times(place, 4))
            arrays = Arrays(panel, of_panel, here, place, following)
            self._compute_panel(arrays, self._from_row(first, sizes), columns, wide)
        if self._widens:
            self.call("free", self.none, wide)
        if not is_packed or lays_out_scales:
            self.call("free", self.none, own_scales)

    def _registers(self) -> contextlib.AbstractContextManager[None]:
        """Configures the registers of AMX for the instructions of its body."""
        if not self._has_amx:
            return contextlib.nullcontext()
        return panel_amx.configured(self, self._rows().lines)

    @property
    def _widens_first(self) -> bool:
        """Whether weights are widened for any number of rows.

        AMX reads them from memory.
        """
        is_read = self._has_amx and self.kernel.bits == 4
        return self.kernel.instructions.takes_int16 or is_read

    @property
    def _widens(self) -> bool:
        """Whether weights are widened once for several rows.

        With AVX2, registers are too few to do so beside the sums of several rows.
        """
        is_beside = self.kernel.bits == 4 and not self.kernel.instructions.has_dots
        return is_beside or self._widens_first

    def _compute_panel(
        self, arrays: Arrays, sizes: Sizes, columns: Any, wide: Any
    ) -> None:
        """Computes rows, as many at once as there are, of a panel of columns."""
        if self._widens_first:
            arrays = self._widened(arrays, sizes, wide)
        if self._has_amx:
            self._compute_many_rows(arrays, sizes, columns)
            return
        at, kernel, done = self.at, self.kernel, self.long(0)
        for count in kernel.instructions.rows_at_once(self._rows().lines):
            # A single row is multiplied by int4 as they are unpacked.
            is_wide = self._widens and (count > 1 or self._widens_first)
            width = kernel.bits * 2 if is_wide else kernel.bits
            of = RowsOfPanel(
                self,
                kernel.instructions,
                kernel.bits,
                kernel.digits,
                count,
                width,
                kernel.carries,
                kernel.coding,
            )
            compute = of.compute_scaled if kernel.is_scaled else of.compute
            left = at.sub(sizes.rows, done)
            after = self.sum(done, at.sub(left, at.srem(left, self.long(count))))
            with self.if_any(done, after):
                given = arrays
                if is_wide and not self._widens_first:
                    given = self._widened(arrays, sizes, wide)
                with self.loop(done, after, count) as row:
                    compute(given, sizes, columns, row, kernel.is_single)
            done = after

    def _compute_many_rows(self, arrays: Arrays, sizes: Sizes, columns: Any) -> None:
        """Computes rows by AMX, of which the last may not fill the registers."""
        lines, carries = self._rows().lines, self.kernel.carries
        groups = [ManyRowsOfPanel(self, lines, n, carries) for n in panel_amx.COUNTS]
        with self.loop(0, sizes.rows, groups[-1].rows) as row:
            self._compute_by_fewest(groups, arrays, sizes, columns, row)

    def _compute_by_fewest(
        self,
        groups: Sequence[ManyRowsOfPanel],
        arrays: Arrays,
        sizes: Sizes,
        columns: Any,
        row: Any,
    ) -> None:
        """Computes rows from one on, by the fewest registers that hold those left."""
        of, *larger = groups
        compute = of.compute_scaled if self.kernel.is_scaled else of.compute
        if not larger:
            compute(arrays, sizes, columns, row)
            return
        left = self.at.sub(sizes.rows, row)
        is_held = self.at.icmp_signed("<=", left, self.long(of.rows))
        with self.at.if_else(is_held) as (then, otherwise):
            with then:
                compute(arrays, sizes, columns, row)
            with otherwise:
                self._compute_by_fewest(larger, arrays, sizes, columns, row)

    def _widened(self, arrays: Arrays, sizes: Sizes, wide: Any) -> Arrays:
        """Widens the weights of a panel to twice their bits."""
        of_block = self._block * self.kernel.bits // (8 * WORD)
        words = self.times(sizes.tiles, sizes.blocks, of_block)
        is_int4 = self.kernel.bits == 4
        halves = self.kernel.coding.unpacked if is_int4 else panels.bytes_as_int16
        panels.widen(self, arrays.weights, words, wide, halves)
        return dataclasses.replace(arrays, weights=wide)

"""A kernel of weights that are codes of a table of 16 floats, for x86-64.

It takes a panel of codes at a time (`panels`). For a single row, codes are looked up in
registers; for several, once for all rows, a block at a time that stays in the cache.
`table_products` calls it.
"""

import dataclasses
import enum
import hashlib
import struct
from typing import Any

from aqtlite.lowering.forms import custom_call, panels
from aqtlite.lowering.forms.panels import PANEL, WORD
from aqtlite.lowering.forms.table_sums import (
    TABLE_BITS,
    Codes,
    Decoded,
    RowsOfTable,
    Runs,
    Table,
    decode,
)

LARGEST_RUN = 64
"""Number of products that are added one by one, at most."""

_BLOCK = 256
"""Number of products that are looked up at a time, of several rows."""

_CACHE, _ROWS, _MOST_ROWS = 2**20, 8, 128
"""Bytes of rows that are multiplied with a panel before the next one, so that they stay
in the cache; their number is a multiple of the second, and at most the third."""

_TOGETHER = 8
"""Number of panels whose codes are laid out together: a line of the cache has the codes
of a product for as many."""

_WORK_OF_CODE, _WORK_OF_PRODUCT = 8, 4
"""Work of looking up a code and of a product, by that of a product of integers."""

_FLOAT, _LINE = 4, 64  # Bytes of float32, and of a line of the cache.

_OF_FLOATS = _FLOAT * PANEL * (_BLOCK + _MOST_ROWS)
"""Bytes of a block, and of the sums of rows so far."""

_SIGNS = {4: panels.SIGNS[4], 8: 0x01010101 * panels.SIGN}
"""What laying out a panel flips in a word, by the bits that a code takes."""


class Layout(enum.IntEnum):
    """How codes lie in memory."""

    PAIRS = 0
    """``(columns, products / 2)``, two in a byte."""

    BYTES = 1
    """``(columns, products)``, in the lower half of a byte."""

    PANELS = 2
    """`panels` of codes of four bits."""

    COLUMNS = 3
    """``(products, columns / 2)``, two columns in a byte."""

    COLUMNS_OF_BYTES = 4
    """``(products, columns)``, in the lower half of a byte."""

    @property
    def is_of_columns(self) -> bool:
        """Whether the codes of a product lie together, not those of a column."""
        return self in (Layout.COLUMNS, Layout.COLUMNS_OF_BYTES)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled into a kernel."""

    table: tuple[float, ...]
    lanes: int
    """Number of floats in a vector: 8 (AVX2) or 16 (AVX-512)."""

    run: int
    """Number of products that are added one by one."""

    layout: Layout
    has_packed_scales: bool
    """Whether the scales are in panels."""

    is_row: bool
    """Whether there is a single row."""

    @property
    def width(self) -> int:
        """Bits that a code takes."""
        has_bytes = self.layout in (Layout.BYTES, Layout.COLUMNS_OF_BYTES)
        return 8 if has_bytes else TABLE_BITS

    @property
    def name(self) -> str:
        """A name of the custom call."""
        parts = dict(vars(self))
        values = struct.pack("<16f", *parts.pop("table"))
        digest = hashlib.sha256(values).hexdigest()[:16]
        return "_".join(["aqtlite_table", *map(str, map(int, parts.values())), digest])

    def rows_at_once(self) -> dict[int, int]:
        """The numbers of rows whose sums stay in registers, and of their runs."""
        if self.is_row:
            return {1: 4 if self.lanes == PANEL else 1}
        return {8: 1, 4: 2, 1: 4} if self.lanes == PANEL else {6: 1, 2: 2, 1: 4}


def registered(kernel: Kernel) -> str:
    """Compiles a kernel, and returns the name of its custom call.

    Its arguments are the codes; the rows, float32 ``(rows, products)``; and the scales,
    float32, ``(columns, tiles)``, in `panels`, or beside codes of columns ``(tiles,
    columns)``. Its result is float32, ``(rows, columns)``.
    """
    custom_call.register(kernel.name, lambda: TableFunction(kernel))
    return kernel.name


@dataclasses.dataclass(frozen=True)
class _Call:
    """Pointers and sizes of a call."""

    codes: Any
    x: Any
    scales: Any
    out: Any
    rows: Any
    columns: Any
    tiles: Any
    products: Any


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Pointers to what a panel of columns is computed from."""

    codes: Codes
    scales: Any
    x: Any
    """The first row."""

    out: Any
    """The first element of the first row of the result."""


class TableFunction(custom_call.Function):
    """Writes a kernel."""

    words = len(dataclasses.fields(_Call))

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        super().__init__()

    def memory(self, frame):
        del frame
        return self.long(0)

    def prepare(self, frame, state, memory):
        del memory
        codes, x, scales = (self.argument(frame, i) for i in range(3))
        out = self.result(frame)
        columns = self.size(out, 1)
        rows, products = (self.size(x, axis) for axis in (0, 1))
        pointers = map(self.data, (codes, x, scales, out))
        words = (*pointers, rows, columns, self._tiles(scales), products)
        for i, value in enumerate(words):
            self.store(value, state, 8 * i, 8)
        lines = self.sum(self.times(rows, _WORK_OF_PRODUCT), _WORK_OF_CODE)
        return columns, self.times(products, lines, PANEL // self.kernel.lanes)

    def _tiles(self, scales: Any) -> Any:
        """The number of tiles of a column."""
        return self.size(scales, 0 if self._has_scales_of_columns else 1)

    @property
    def _has_scales_of_columns(self) -> bool:
        return self.kernel.layout.is_of_columns and not self.kernel.has_packed_scales

    def compute(self, state, start, stop):
        at, words = self.at, range(4, self.words)
        pointers = (self.word(state, i, self.pointer) for i in range(4))
        call = _Call(*pointers, *(self.word(state, i) for i in words))
        table = Table(self, self.kernel.table, self.kernel.lanes)
        size = self.sum(_OF_FLOATS, self.times(call.tiles, _FLOAT * PANEL), _LINE)
        if self.kernel.layout is not Layout.PANELS:
            size = self.sum(size, self.times(self._panel_bytes(call), _TOGETHER))
        taken = self.call("malloc", self.pointer, size)
        # A vector that is not aligned lies in two lines of the cache.
        above = at.ptrtoint(self.offset(taken, _LINE), self.long)
        own = at.inttoptr(at.and_(above, self.long(-_LINE)), self.pointer)
        own_scales = self.offset(own, _OF_FLOATS)
        own_codes = self.offset(own_scales, self.times(call.tiles, _FLOAT * PANEL))
        together = self._together(call)
        with (
            self.loop(0, call.rows, together) as first,
            self.loop(start, stop, PANEL * _TOGETHER) as group,
        ):
            end = self.least(self.sum(group, PANEL * _TOGETHER), stop)
            if self.kernel.layout is not Layout.PANELS:
                self._lay_out(call, group, end, own_codes)
            with self.loop(group, end, PANEL) as index:
                codes = self._codes_of_panel(call, group, index, own_codes)
                codes = Codes(table, codes, self.kernel.width)
                panel = self._panel(call, codes, first, index, own_scales)
                if self.kernel.is_row:
                    self._compute_row(panel, call)
                else:
                    rows = self.least(at.sub(call.rows, first), together)
                    self._compute_rows(panel, call, rows, own)
        self.call("free", self.none, taken)

    def _row_bytes(self, call: _Call) -> Any:
        """Bytes of the codes of a column."""
        return self.at.sdiv(self.times(call.products, self.kernel.width), self.long(8))

    def _panel_bytes(self, call: _Call) -> Any:
        """Bytes of the codes of a panel."""
        return self.times(self._row_bytes(call), PANEL)

    def _column(self, call: _Call, index: Any) -> Any:
        """The first column of a panel: the last one ends with the last column."""
        return self.least(index, self.at.sub(call.columns, self.long(PANEL)))

    def _codes_of_panel(self, call: _Call, group: Any, index: Any, own: Any) -> Any:
        """The codes of a panel, as given or as they were laid out for its group."""
        if self.kernel.layout is Layout.PANELS:
            return self.offset(call.codes, self.times(index, self._row_bytes(call)))
        before = self.times(self.at.sub(index, group), self._row_bytes(call))
        return self.offset(own, before)

    def _lay_out(self, call: _Call, start: Any, stop: Any, own: Any) -> None:
        """Lays out the codes of a group of panels.

        Codes of columns are read a word of all panels at a time: those of a product lie
        together, and those of the next one on another page.
        """
        width, row_bytes = self.kernel.width, self._row_bytes(call)
        words = self.at.sdiv(row_bytes, self.long(WORD))
        if not self.kernel.layout.is_of_columns:
            with self.loop(start, stop, PANEL) as index:
                before = self.times(self._column(call, index), row_bytes)
                codes = self.offset(call.codes, before)
                panel = self._codes_of_panel(call, start, index, own)
                panels.lay_out(self, codes, words, panel, _SIGNS[width])
            return
        with self.loop(0, words) as word, self.loop(start, stop, PANEL) as index:
            before = self.times(self._column(call, index), width)
            codes = self.offset(call.codes, self.at.sdiv(before, self.long(8)))
            panel = self._codes_of_panel(call, start, index, own)
            given = self, codes, call.columns, word, panel
            if width == TABLE_BITS:
                panels.lay_out_word_of_pairs(*given)
            else:
                panels.lay_out_word_of_bytes(*given, _SIGNS[width])

    def _panel(
        self, call: _Call, codes: Codes, first: Any, index: Any, own: Any
    ) -> _Panel:
        """The panel of the columns from one on, and rows from a first one on.

        Args:
            call: pointers and sizes of the call.
            codes: the codes of the panel.
            first: first row.
            index: first column.
            own: memory for scales that are laid out here.
        """
        column, scales = self._column(call, index), own
        if self.kernel.has_packed_scales:
            before = self.times(index, call.tiles, _FLOAT)
            scales = self.offset(call.scales, before)
        elif self._has_scales_of_columns:
            self._copy_scales(call, column, own)
        else:
            before = self.times(column, call.tiles, _FLOAT)
            panels.lay_out(self, self.offset(call.scales, before), call.tiles, own)
        place = self.sum(self.times(first, call.columns), column)
        return _Panel(
            codes,
            scales,
            self.offset(call.x, self.times(first, call.products, _FLOAT)),
            self.offset(call.out, self.times(place, _FLOAT)),
        )

    def _copy_scales(self, call: _Call, column: Any, own: Any) -> None:
        """Lays out scales ``(tiles, columns)`` of a panel."""
        floats = self.ir.VectorType(self.ir.FloatType(), PANEL)
        with self.loop(0, call.tiles) as tile:
            place = self.sum(self.times(tile, call.columns), column)
            found = self.load(call.scales, self.times(place, _FLOAT), floats)
            self.store(found, own, self.times(tile, _FLOAT * PANEL))

    def _together(self, call: _Call) -> Any:
        """The number of rows that are multiplied by a panel before the next one."""
        groups = self.at.sdiv(
            self.long(_CACHE // (_FLOAT * _ROWS)), self.sum(call.products, 1)
        )
        return self.least(self.times(self.sum(groups, 1), _ROWS), _MOST_ROWS)

    def _runs(self, call: _Call) -> tuple[Any, Any]:
        """The number of runs of a row, and of a tile."""
        runs = self.at.sdiv(call.products, self.long(self.kernel.run))
        return runs, self.at.sdiv(runs, call.tiles)

    def _compute_row(self, panel: _Panel, call: _Call) -> None:
        runs, of_tile = self._runs(call)
        ((count, together),) = self.kernel.rows_at_once().items()
        of = RowsOfTable(panel.codes.table, self.kernel.run, count, together)
        of.start(None)
        every = Runs(self.long(0), runs, of_tile)
        of.add(panel.codes, [panel.x], panel.scales, every)
        of.finish([panel.out])

    def _compute_rows(self, panel: _Panel, call: _Call, rows: Any, floats: Any) -> None:
        """Computes rows block by block, with memory for floats and totals."""
        kernel = self.kernel
        runs, of_tile = self._runs(call)
        with self.loop(0, runs, _BLOCK // kernel.run) as first:
            stop = self.least(self.sum(first, _BLOCK // kernel.run), runs)
            start, end = (self.times(one, kernel.run) for one in (first, stop))
            decode(panel.codes, start, end, floats)
            source = Decoded(panel.codes.table, floats, start)
            block, done = Runs(first, stop, of_tile), self.long(0)
            for count in kernel.rows_at_once():
                left = self.at.srem(self.at.sub(rows, done), self.long(count))
                after = self.at.sub(rows, left)
                with self.if_any(done, after), self.loop(done, after, count) as row:
                    each = [self.sum(row, i) for i in range(count)]
                    self._add_block(panel, call, source, block, each)
                done = after

    def _add_block(
        self, panel: _Panel, call: _Call, source: Decoded, block: Runs, rows: list[Any]
    ) -> None:
        """Adds a block to the totals of some rows.

        Totals lie behind the block, because other threads may write the same columns:
        only what is final goes to the result.
        """
        kernel, at = self.kernel, self.at
        runs, _ = self._runs(call)
        totals = self.offset(source.pointer, _FLOAT * PANEL * _BLOCK)
        x, before, ends = (
            [self.offset(pointer, self.times(row, size, _FLOAT)) for row in rows]
            for pointer, size in (
                (panel.x, call.products),
                (totals, PANEL),
                (panel.out, call.columns),
            )
        )
        together = kernel.rows_at_once()[len(rows)]
        of = RowsOfTable(source.table, kernel.run, len(rows), together)
        of.start(before, at.icmp_signed("==", block.first, self.long(0)))
        of.add(source, x, panel.scales, block)
        is_last = at.icmp_signed("==", block.stop, runs)
        pairs = zip(ends, before, strict=True)
        of.finish([at.select(is_last, end, place) for end, place in pairs])

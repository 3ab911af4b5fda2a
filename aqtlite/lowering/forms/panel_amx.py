"""Sums of products of a panel of weights with many rows, by AMX.

A register of AMX has up to 16 rows of 64 bytes. One has 64 weights of each column of a
panel, as the panel lies in memory; another 64 numbers of some lines
(`panel_rows.Memory`); and a third their sums, int32. See Intel's "Architecture
Instruction Set Extensions Programming Reference", chapter 3.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from aqtlite.lowering.forms import custom_call
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.forms.panel_rows import Sizes
from aqtlite.lowering.forms.panel_sums import Arrays, scaled, with_carries
from aqtlite.lowering.forms.panels import PANEL

COUNTS = 1, 2, 3
"""The numbers of registers of lines that a register of weights is multiplied by."""

_ROWS, _ROW = 16, 64
"""Largest number of rows of a register, and size of a row in bytes."""

BEYOND = COUNTS[-1] * _ROWS * _ROW
"""Bytes behind the lines that may be read, for registers that are not full."""

_SUMS, _LINES, _WEIGHTS, _REGISTERS = 0, 3, 6, 8
"""Numbers of the first registers of sums, of lines and of weights, and of all."""

_PALETTE, _SIZES, _HEIGHTS = 1, 16, 48
"""The configuration of registers: its kind, and where it has the size of the rows of
each register, int16, and their number, int8."""


@contextlib.contextmanager
def configured(f: custom_call.Function, lines: int) -> Iterator[None]:
    """Configures the registers for the instructions of its body, and restores them.

    A library that XLA calls may remember its own configuration.
    """
    before, made = (f.array(f.byte, _ROW, _ROW) for _ in range(2))
    f.call("llvm.x86.sttilecfg", f.none, before)
    f.store(f.constant(f.ir.VectorType(f.byte, _ROW), 0), made, 0)
    f.store(f.byte(_PALETTE), made, 0)
    for register in range(_REGISTERS):
        height = _ROWS if register >= _WEIGHTS else _ROWS // lines * lines
        f.store(f.ir.IntType(16)(_ROW), made, _SIZES + 2 * register)
        f.store(f.byte(height), made, _HEIGHTS + register)
    f.call("llvm.x86.ldtilecfg", f.none, made)
    yield
    f.call("llvm.x86.ldtilecfg", f.none, before)


class ManyRowsOfPanel:
    """Writes the instructions that compute up to `rows` rows of a panel of columns.

    Behind the last row, registers have lines of others, whose sums are not read.
    `found` has the sums of their lines, int32 ``(rows, lines, PANEL)``, and `totals`
    those that are scaled, float32 ``(rows, PANEL)``. (Results are no place for these:
    two panels may share columns, which two threads compute.)
    """

    def __init__(
        self, function: custom_call.Function, lines: int, count: int, carries: bool
    ):
        self.f, self.lines, self.count, self.carries = function, lines, count, carries
        self.rows = count * (_ROWS // lines)
        self.size = _ROWS // lines * lines * _ROW
        self.found = function.array(function.byte, count * self.size, _ROW)
        self.totals = function.array(function.byte, self.rows * _ROW, _ROW)
        self.ints, self.floats = (
            kind(function) for kind in (Instructions.AMX.ints, Instructions.AMX.floats)
        )

    def compute(self, arrays: Arrays, sizes: Sizes, columns: Any, row: Any) -> None:
        """Writes the sums of a single tile, from a row on."""
        f, tile = self.f, self.f.long(0)
        self.multiply(arrays, sizes, row, tile)
        with f.loop(0, self._count_from(row, sizes)) as i:
            (total,) = self._sums(arrays, sizes, row, i, tile)
            f.store(total, arrays.out, f.times(f.sum(row, i), columns, 4))

    def compute_scaled(
        self, arrays: Arrays, sizes: Sizes, columns: Any, row: Any
    ) -> None:
        """Writes the scaled sums of tiles, from a row on."""
        f, count = self.f, self._count_from(row, sizes)
        with f.loop(0, count) as i:
            # Unlike zero, it changes no term that is added to it.
            f.store(f.constant(self.floats, -0.0), self.totals, f.times(i, _ROW), _ROW)
        with f.loop(0, sizes.tiles) as tile:
            self.multiply(arrays, sizes, row, tile)
            scale = f.load(arrays.scales, f.times(tile, 4 * PANEL), self.floats, 4)
            with f.loop(0, count) as i:
                sums = self._sums(arrays, sizes, row, i, tile)
                place = f.times(f.sum(f.times(f.sum(row, i), sizes.tiles), tile), 4)
                factor = f.load(arrays.rows.units, place, f.ir.FloatType(), 4)
                term = scaled(f, sums, scale, f.splat(factor, PANEL))
                total = f.load(self.totals, f.times(i, _ROW), self.floats, _ROW)
                total = f.at.fadd(total, term)
                f.store(total, self.totals, f.times(i, _ROW), _ROW)
        with f.loop(0, count) as i:
            total = f.load(self.totals, f.times(i, _ROW), self.floats, _ROW)
            f.store(total, arrays.out, f.times(f.sum(row, i), columns, 4))

    def _count_from(self, row: Any, sizes: Sizes) -> Any:
        """The number of rows that are there from one on."""
        return self.f.least(self.rows, self.f.at.sub(sizes.rows, row))

    def multiply(self, arrays: Arrays, sizes: Sizes, row: Any, tile: Any) -> None:
        """Writes the sums of the lines of the rows, of a tile, to `found`."""
        f, size = self.f, self.f.long(_ROW)
        for i in range(self.count):
            f.call("llvm.x86.tilezero", f.none, f.byte(_SUMS + i))
        with f.loop(0, sizes.blocks) as block:
            step = f.sum(f.times(tile, sizes.blocks), block)
            weights = f.offset(arrays.weights, f.times(step, _ROWS * _ROW))
            line = f.times(f.sum(f.times(step, sizes.rows), row), self.lines, _ROW)
            self._load(_WEIGHTS, weights)
            for i in range(self.count):
                start = f.offset(arrays.rows.values, f.sum(line, i * self.size))
                self._load(_LINES + i, start)
                registers = _SUMS + i, _LINES + i, _WEIGHTS
                f.call("llvm.x86.tdpbsud", f.none, *map(f.byte, registers))
        for i in range(self.count):
            there = f.offset(self.found, i * self.size)
            f.call("llvm.x86.tilestored64", f.none, f.byte(_SUMS + i), there, size)

    def _load(self, register: int, start: Any) -> None:
        f, name = self.f, "llvm.x86.tileloadd64"
        f.call(name, f.none, f.byte(register), start, f.long(_ROW))

    def _sums(
        self, arrays: Arrays, sizes: Sizes, row: Any, i: Any, tile: Any
    ) -> list[Any]:
        """The sums of the digits of a row, lowest first."""
        f, sums = self.f, []
        before = f.sum(f.times(tile, sizes.rows), row, i)
        for line in range(self.lines):
            place = f.sum(f.times(i, self.lines), line)
            total = f.load(self.found, f.times(place, _ROW), self.ints)
            place = f.times(f.sum(f.times(before, self.lines), line), 4)
            # What raising the weights adds, negated.
            offset = f.load(arrays.rows.offsets, place, f.int, 4)
            sums.append(f.at.add(total, f.splat(offset, PANEL)))
        return with_carries(f, sums) if self.carries else sums

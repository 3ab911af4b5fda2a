"""Sums of products of a panel of weights with a few rows, kept in registers.

Sums of a tile are int32. They are returned, of a single tile and digit, or scaled and
added in float32, tile by tile, in the order of the forms of XLA.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from aqtlite.lowering.forms import custom_call, panels
from aqtlite.lowering.forms.panel_rows import BLOCK, Memory, Sizes
from aqtlite.lowering.forms.panels import PANEL, WORD
from aqtlite.lowering.forms.products_of_bytes import Instructions

_WAITING = 4
"""Number of additions that a processor begins before it has the first one's sum."""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Pointers to what a panel of columns is computed from, and to the columns."""

    weights: Any
    """`panels`."""

    scales: Any
    """Scales of the weights, float32, ``(tiles, PANEL)``."""

    rows: Memory
    """The other operand, with the scales of the rows in place of units if it is int8.
    """

    out: Any
    """int32 or float32, ``(rows, columns)``, from the first column of the panel on."""

    following: Any = None
    """Scales that are read after those of the panel, to be fetched beside its weights;
    None for none."""


class RowsOfPanel:
    """Writes the instructions that compute some rows of a panel of columns.

    A line is a part of a digit of a row. `sums` has, for each digit of each row, each
    part and each vector of a word of all weights of a panel, variables that are added
    up at the end.
    """

    def __init__(
        self,
        function: custom_call.Function,
        instructions: Instructions,
        bits: int,
        digits: int,
        count: int,
        width: int,
    ):
        self.f, self.how = function, instructions
        self.products, self.parts = instructions.products, instructions.parts(bits)
        self.digits, self.lines, self.width = digits, digits * self.parts, width
        self.ints, self.floats = (
            instructions.ints(function),
            instructions.floats(function),
        )
        vectors = range(instructions.vectors)
        of_all = count * self.lines * len(vectors)
        waiting = of_all if self.products.is_wide else _WAITING
        copies = range(max(1, _WAITING // waiting))
        self.sums = [
            [
                [[function.variable(self.ints) for _ in copies] for _ in vectors]
                for _ in range(self.parts)
            ]
            for _ in range(count * digits)
        ]
        self.totals = [
            [function.variable(self.floats) for _ in vectors] for _ in range(count)
        ]

    def compute(
        self, arrays: Arrays, sizes: Sizes, columns: Any, row: Any, is_single: bool
    ) -> None:
        """Writes the sums of a single tile; of a single block, if `is_single`."""
        self._add_tile(arrays, sizes, row, self.f.long(0), is_single)
        vectors = range(self.how.vectors)
        found = [[self._sum(digit, j) for j in vectors] for digit in self.sums]
        self._store(found, arrays.out, columns, row)

    def compute_scaled(
        self, arrays: Arrays, sizes: Sizes, columns: Any, row: Any, is_single: bool
    ) -> None:
        """Writes the scaled sums of tiles; of single blocks, if `is_single`."""
        at = self.f.at
        for one in itertools.chain(*self.totals):
            # Unlike zero, it changes no term that is added to it.
            at.store(self.f.constant(self.floats, -0.0), one)
        with self.f.loop(0, sizes.tiles) as tile:
            if arrays.following is not None:
                self.f.prefetch(arrays.following, self.f.times(tile, 4 * PANEL))
            self._add_tile(arrays, sizes, row, tile, is_single)
            self._accumulate(arrays, sizes, row, tile)
        found = [[at.load(one) for one in of_row] for of_row in self.totals]
        self._store(found, arrays.out, columns, row)

    def _store(self, found: list[list[Any]], out: Any, columns: Any, row: Any) -> None:
        f = self.f
        for i, of_row in enumerate(found):
            start = f.times(f.sum(row, i), columns, 4)
            for j, value in enumerate(of_row):
                f.store(value, out, f.sum(start, 4 * self.how.lanes * j))

    def _add_tile(
        self, arrays: Arrays, sizes: Sizes, row: Any, tile: Any, is_single: bool
    ) -> None:
        f = self.f
        before = f.times(f.sum(f.times(tile, sizes.rows), row), self.lines)
        for i, of_line in enumerate(itertools.chain(*self.sums)):
            # What raising the weights adds, negated.
            offset = f.load(arrays.rows.offsets, f.times(f.sum(before, i), 4), f.int, 4)
            for first, *others in of_line:
                f.at.store(f.splat(offset, self.how.lanes), first)
                for other in others:
                    f.at.store(f.constant(self.ints, 0), other)

        def add(block: Any) -> None:
            step = f.sum(f.times(tile, sizes.blocks), block)
            weights = f.offset(
                arrays.weights, f.times(step, PANEL * BLOCK * self.width // 8)
            )
            line = f.times(f.sum(f.times(step, sizes.rows), row), self.lines, BLOCK)
            self._add_block(weights, f.offset(arrays.rows.values, line))

        if is_single:
            add(f.long(0))
            return
        with f.loop(0, sizes.blocks) as block:
            add(block)

    def _add_block(self, weights: Any, x: Any) -> None:
        f, at, how, products = self.f, self.f.at, self.how, self.products
        sums = list(itertools.chain(*self.sums))
        before = [[[at.load(one) for one in of] for of in line] for line in sums]
        parts = [
            [[products.started(one) for one in of] for of in line] for line in before
        ]
        for k, wide in enumerate(self._bytes(weights)):
            for line, of_line in enumerate(parts):
                other = f.load(x, BLOCK * line + WORD * k, f.int, WORD)
                other = f.splat(other, how.lanes)
                for one, of in zip(wide, of_line, strict=True):
                    copy = k % len(of)
                    of[copy] = products.multiplied(f, of[copy], one, other)
        flat = zip(*(_leaves(one) for one in (sums, before, parts)), strict=True)
        for variable, total, part in flat:
            at.store(products.finished(f, total, part), variable)

    def _bytes(self, weights: Any) -> Iterator[list[Any]]:
        """Yields the weights of a block as uint8, four of each row at a time."""
        f, how = self.f, self.how
        for i in range(BLOCK * self.width // (8 * WORD)):
            words = [
                f.load(weights, WORD * (PANEL * i + how.lanes * j), self.ints)
                for j in range(how.vectors)
            ]
            if self.width == 8:
                yield words
            else:
                yield [panels.lower_halves(f, word) for word in words]
                yield [panels.upper_halves(f, word) for word in words]

    def _sum(self, digit: list[list[list[Any]]], vector: int) -> Any:
        """The sum of a digit, from that of its parts."""
        at = self.f.at
        low, *high = (
            functools.reduce(at.add, map(at.load, line[vector])) for line in digit
        )
        for one in high:
            low = at.add(low, at.shl(one, self.f.constant(self.ints, 4)))
        return low

    def _accumulate(self, arrays: Arrays, sizes: Sizes, row: Any, tile: Any) -> None:
        """Scales the sums of a tile, and adds them to the totals.

        LLVM is not allowed to contract products and sums.
        """
        f, at, digits, lanes = self.f, self.f.at, self.digits, self.how.lanes
        base = f.constant(self.floats, 256.0)
        for i, of_row in enumerate(self.totals):
            place = f.sum(f.times(f.sum(row, i), sizes.tiles), tile)
            factor = f.load(arrays.rows.units, f.times(place, 4), f.ir.FloatType(), 4)
            factor = f.splat(factor, lanes)
            for j, variable in enumerate(of_row):
                *low, total = (
                    at.sitofp(self._sum(digit, j), self.floats)
                    for digit in self.sums[i * digits : (i + 1) * digits]
                )
                for part in reversed(low):
                    # The product is exact, so that it may be contracted.
                    name = f"llvm.fmuladd.v{lanes}f32"
                    total = f.call(name, self.floats, total, base, part)
                place = f.sum(f.times(tile, 4 * PANEL), 4 * lanes * j)
                scale = f.load(arrays.scales, place, self.floats, 4)
                ordered = scale, factor
                for other in ordered if digits == 1 else reversed(ordered):
                    total = at.fmul(total, other)
                at.store(at.fadd(at.load(variable), total), variable)


def _leaves(nested: list[list[list[Any]]]) -> list[Any]:
    return [one for line in nested for copies in line for one in copies]

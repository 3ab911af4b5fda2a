"""Sums of products of a panel of weights with a few rows, kept in registers.

Sums of a tile are int32. They are returned, of a single tile and digit, or scaled and
added in float32, tile by tile, in the order of the forms of XLA.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from aqtlite.lowering.digits import BITS
from aqtlite.lowering.forms import custom_call
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.forms.panel_rows import Memory, Sizes
from aqtlite.lowering.forms.panels import PANEL, WORD
from aqtlite.lowering.forms.weight_coding import Coding

_WAITING = 4
"""Number of additions that a processor begins before it has the first one's sum."""

_AHEAD, _LINE = 2**11, 64
"""Distance in bytes at which weights are fetched for a single row, which a processor
does by itself only up to the end of a page, and the size of a line of the cache."""

_BLOCKS_OF_INT32 = 16
"""Number of blocks whose products of two digits by int8 have sums of 2^30 at most."""


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

    A line is a part of a number of a row. `sums` has, for each number of each row, each
    part and each vector of a word of all weights of a panel, variables that are added
    up at the end. `carried` has two for each row and vector, if two digits are a
    number: what lies above the lowest 8 bits of its sums, and these bits.
    """

    def __init__(
        self,
        function: custom_call.Function,
        instructions: Instructions,
        bits: int,
        digits: int,
        count: int,
        width: int,
        carries: bool,
        coding: Coding,
    ):
        self.f, self.how = function, instructions
        self.products, self.parts = instructions.products, instructions.parts(bits)
        self.numbers = instructions.numbers(digits)
        self.lines, self.width = self.numbers * self.parts, width
        self.carries, self.coding = carries, coding
        largest = coding.largest(bits) * 2 ** (BITS // self.parts - 1)
        self.steps = self.products.steps(largest)
        self.block = instructions.block
        self.line_size = self.block * instructions.number_size
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
            for _ in range(count * self.numbers)
        ]
        self.carried = [
            [[function.variable(self.ints) for _ in range(2)] for _ in vectors]
            for _ in range(count if instructions.takes_int16 else 0)
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
        zero = f.constant(self.ints, 0)
        for variable in _leaves([self.carried, *self.sums]):
            f.at.store(zero, variable)
        if not self.how.takes_int16:
            for i, of_line in enumerate(itertools.chain(*self.sums)):
                # What raising the weights adds, negated.
                place = f.times(f.sum(before, i), 4)
                offset = f.load(arrays.rows.offsets, place, f.int, 4)
                for first, *_ in of_line:
                    f.at.store(f.splat(offset, self.how.lanes), first)

        def add(block: Any) -> None:
            step = f.sum(f.times(tile, sizes.blocks), block)
            weights = f.offset(
                arrays.weights, f.times(step, PANEL * self.block * self.width // 8)
            )
            line = f.sum(f.times(step, sizes.rows), row)
            line = f.times(line, self.lines, self.line_size)
            self._add_block(weights, f.offset(arrays.rows.values, line))

        if is_single:
            add(f.long(0))
            if self.carried:
                self._carry()
        elif self.carried:
            with f.loop(0, sizes.blocks, _BLOCKS_OF_INT32) as first:
                stop = f.least(f.sum(first, _BLOCKS_OF_INT32), sizes.blocks)
                with f.loop(first, stop) as block:
                    add(block)
                self._carry()
        else:
            with f.loop(0, sizes.blocks) as block:
                add(block)

    def _carry(self) -> None:
        """Moves the sums of numbers of two digits to where they do not leave int32."""
        at, numbers = self.f.at, self.numbers
        highest = self.sums[numbers - 1 :: numbers]
        for (of_number,), of_row in zip(highest, self.carried, strict=True):
            for copies, (high, low) in zip(of_number, of_row, strict=True):
                total = functools.reduce(at.add, map(at.load, copies))
                for part, variable in zip(
                    _split(self.f, total), (high, low), strict=True
                ):
                    at.store(at.add(at.load(variable), part), variable)
                for one in copies:
                    at.store(self.f.constant(self.ints, 0), one)

    def _add_block(self, weights: Any, x: Any) -> None:
        f, at, how, products = self.f, self.f.at, self.how, self.products
        if len(self.totals) == 1 and how is Instructions.AVX2:
            for line in range(0, PANEL * self.block * self.width // 8, _LINE):
                f.prefetch(weights, _AHEAD + line)
        sums = list(itertools.chain(*self.sums))
        finish = functools.partial(products.finished, f)
        before = _mapped(at.load, sums)
        parts = _mapped(products.started, before)
        for k, wide in enumerate(self._words(weights)):
            if k and k % self.steps == 0:
                before = _mapped(finish, before, parts)
                parts = _mapped(products.started, before)
            for line, of_line in enumerate(parts):
                other = f.load(x, self.line_size * line + WORD * k, f.int, WORD)
                other = f.splat(other, how.lanes)
                for one, of in zip(wide, of_line, strict=True):
                    copy = k % len(of)
                    of[copy] = products.multiplied(f, of[copy], one, other)
        _mapped(at.store, _mapped(finish, before, parts), sums)

    def _words(self, weights: Any) -> Iterator[list[Any]]:
        """Yields the weights of a block, a word of each row at a time."""
        f, how = self.f, self.how
        for i in range(self.block * self.width // (8 * WORD)):
            words = [
                f.load(weights, WORD * (PANEL * i + how.lanes * j), self.ints)
                for j in range(how.vectors)
            ]
            if self.width >= 8:
                yield words
            else:
                halves = [self.coding.unpacked(f, word) for word in words]
                yield from map(list, zip(*halves, strict=True))

    def _sum(self, number: list[list[list[Any]]], vector: int) -> Any:
        """The sum of a number, from that of its parts."""
        at = self.f.at
        low, *high = (
            functools.reduce(at.add, map(at.load, line[vector])) for line in number
        )
        for one in high:
            low = at.add(low, at.shl(one, self.f.constant(self.ints, 4)))
        return low

    def _sums_of_digits(self, row: int, vector: int) -> list[Any]:
        """The sums of the digits of a row, lowest first; see `digits.rounded`."""
        at, numbers = self.f.at, self.numbers
        of_row = self.sums[row * numbers : (row + 1) * numbers]
        if self.carried:
            low = [self._sum(number, vector) for number in of_row[:-1]]
            highest, below = map(at.load, self.carried[row][vector])
        else:
            sums = [self._sum(number, vector) for number in of_row]
            return with_carries(self.f, sums) if self.carries else sums
        return with_carries(self.f, [*low, below, highest])

    def _accumulate(self, arrays: Arrays, sizes: Sizes, row: Any, tile: Any) -> None:
        """Scales the sums of a tile, and adds them to the totals."""
        f, at, lanes = self.f, self.f.at, self.how.lanes
        for i, of_row in enumerate(self.totals):
            place = f.sum(f.times(f.sum(row, i), sizes.tiles), tile)
            factor = f.load(arrays.rows.units, f.times(place, 4), f.ir.FloatType(), 4)
            factor = f.splat(factor, lanes)
            for j, variable in enumerate(of_row):
                place = f.sum(f.times(tile, 4 * PANEL), 4 * lanes * j)
                scale = f.load(arrays.scales, place, self.floats, 4)
                total = scaled(f, self._sums_of_digits(i, j), scale, factor)
                at.store(at.fadd(at.load(variable), total), variable)


def with_carries(f: custom_call.Function, sums: list[Any]) -> list[Any]:
    """Moves what the second highest of some sums has above its lowest 8 bits up."""
    *low, below, highest = sums
    carried, below = _split(f, below)
    return [*low, below, f.at.add(highest, carried)]


def _split(f: custom_call.Function, total: Any) -> tuple[Any, Any]:
    """What a sum has above the lowest 8 bits, and these bits."""
    eight, byte = (f.constant(total.type, n) for n in (BITS, 2**BITS - 1))
    return f.at.ashr(total, eight), f.at.and_(total, byte)


def scaled(f: custom_call.Function, sums: list[Any], scale: Any, factor: Any) -> Any:
    """Scales a number whose digits have sums.

    LLVM is not allowed to contract products and sums.

    Args:
        f: function that is being written.
        sums: vectors of int32, of the lowest digit first.
        scale: scales of the weights, vector of float32.
        factor: scale or unit of the row, likewise.
    """
    lanes = scale.type.count
    base = f.constant(scale.type, 256.0)
    *low, total = (f.at.sitofp(one, scale.type) for one in sums)
    for part in reversed(low):
        # The product is exact, so that it may be contracted.
        total = f.call(f"llvm.fmuladd.v{lanes}f32", scale.type, total, base, part)
    ordered = scale, factor
    for other in ordered if len(sums) == 1 else reversed(ordered):
        total = f.at.fmul(total, other)
    return total


def _mapped(function: Callable[..., Any], *nested: Any) -> Any:
    """Calls a function with the elements of lists that are nested alike."""
    if not isinstance(nested[0], list):
        return function(*nested)
    return [_mapped(function, *parts) for parts in zip(*nested, strict=True)]


def _leaves(nested: Any) -> list[Any]:
    if isinstance(nested, list):
        return [leaf for one in nested for leaf in _leaves(one)]
    return [nested]

"""Sums of products of a panel of codes of a table with a few rows, in registers.

The order of a sum depends on nothing but its products: a run of a tile is added product
by product, by fused products and sums, and scaled sums of runs are added run by run.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from aqtlite.lowering.forms import custom_call
from aqtlite.lowering.forms.panels import PANEL, SIGN

STEP = 8
"""Number of products that are read at a time."""

TABLE_BITS = 4
"""Bits of a code."""

_AHEAD, _LINE = 2**11, 64
"""Distance in bytes at which codes are fetched, and the size of a line of the cache."""


class Table:
    """Looks codes up in registers.

    Args:
        f: function that is being written.
        values: the table.
        lanes: number of floats in a vector, 8 or 16.
    """

    def __init__(self, f: custom_call.Function, values: Sequence[float], lanes: int):
        self.f, self.lanes = f, lanes
        self.floats = f.ir.VectorType(f.ir.FloatType(), lanes)
        self.ints = f.ir.VectorType(f.int, lanes)
        raised = [values[code ^ SIGN] for code in range(2**TABLE_BITS)]
        self.parts = [
            f.ir.Constant(self.floats, raised[start : start + lanes])
            for start in range(0, len(raised), lanes)
        ]

    @property
    def vectors(self) -> range:
        """Indices of the vectors of a panel."""
        return range(PANEL // self.lanes)

    def floats_of(self, words: Any, place: int) -> Any:
        """The floats of codes that are in a place of bits of a vector of int32."""
        f, at = self.f, self.f.at
        index = at.lshr(words, f.constant(self.ints, place)) if place else words
        if self.lanes == PANEL:
            name = "llvm.x86.avx512.permvar.sf.512"
            return f.call(name, self.floats, self.parts[0], index)
        # These look only at three bits of a code, the highest of which is the sign.
        low, high = (
            f.call("llvm.x86.avx2.permps", self.floats, part, index)
            for part in self.parts
        )
        up = 32 - TABLE_BITS - place
        signs = at.shl(words, f.constant(self.ints, up)) if up else words
        is_high = at.icmp_signed("<", signs, f.constant(self.ints, 0))
        return at.select(is_high, high, low)


class Source(abc.ABC):
    """Floats of a panel, in memory."""

    @abc.abstractmethod
    def read(self, product: Any) -> list[list[Any]]:
        """The vectors of each of `STEP` products, from one on."""


@dataclasses.dataclass(frozen=True)
class Codes(Source):
    """Codes, looked up as they are read."""

    table: Table
    pointer: Any
    width: int
    """Bits that a code takes: 4 or 8."""

    def read(self, product):
        f, size = self.table.f, PANEL * self.width // 8
        start = f.times(product, size)
        for line in range(0, STEP * size, _LINE):
            f.prefetch(self.pointer, f.sum(start, _AHEAD + line))
        found = []
        for first in range(0, STEP * size, 4 * PANEL):
            words = [
                f.load(
                    self.pointer,
                    f.sum(start, first + 4 * self.table.lanes * i),
                    self.table.ints,
                )
                for i in self.table.vectors
            ]
            found += [
                [self.table.floats_of(one, place) for one in words]
                for place in range(0, 32, self.width)
            ]
        return found


@dataclasses.dataclass(frozen=True)
class Decoded(Source):
    """Floats, ``(products, PANEL)``, of products from a first one on."""

    table: Table
    pointer: Any
    first: Any

    def read(self, product):
        f, lanes = self.table.f, self.table.lanes
        start = f.times(f.at.sub(product, self.first), 4 * PANEL)
        return [
            [
                f.load(
                    self.pointer,
                    f.sum(start, 4 * (PANEL * k + lanes * i)),
                    self.table.floats,
                )
                for i in self.table.vectors
            ]
            for k in range(STEP)
        ]


def decode(codes: Codes, first: Any, stop: Any, floats: Any) -> None:
    """Writes the instructions that store the floats of products, for `Decoded`."""
    f, lanes = codes.table.f, codes.table.lanes
    with f.loop(first, stop, STEP) as product:
        there = f.offset(floats, f.times(f.at.sub(product, first), 4 * PANEL))
        for k, vectors in enumerate(codes.read(product)):
            for i, value in enumerate(vectors):
                f.store(value, there, 4 * (PANEL * k + lanes * i))


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of products that are added to sums."""

    first: Any
    stop: Any

    of_tile: Any
    """Number of runs in a tile."""


class RowsOfTable:
    """Writes the instructions that compute some rows of a panel of columns.

    Args:
        table: the table.
        run: products of a run, a multiple of `STEP`.
        count: number of rows.
        together: number of runs that are added at a time, so that the processor need
            not wait for one sum before it begins another.
    """

    def __init__(self, table: Table, run: int, count: int, together: int):
        self.f, self.table, self.run = table.f, table, run
        self.rows, self.together = range(count), together
        variables = functools.partial(table.f.variable, table.floats)
        self.totals = [[variables() for _ in table.vectors] for _ in self.rows]
        self.sums = [
            [[variables() for _ in table.vectors] for _ in self.rows]
            for _ in range(together)
        ]

    def start(self, before: Sequence[Any] | None, is_first: Any = None) -> None:
        """Begins with zero, or with totals at pointers unless `is_first`."""
        f, zero = self.f, self.f.constant(self.table.floats, 0.0)
        for row, of_row in enumerate(self.totals):
            for i, variable in enumerate(of_row):
                value = zero
                if before is not None:
                    place = 4 * self.table.lanes * i
                    found = f.load(before[row], place, self.table.floats)
                    value = f.at.select(is_first, zero, found)
                f.at.store(value, variable)

    def finish(self, places: Sequence[Any]) -> None:
        """Stores the totals of each row at its pointer."""
        for place, of_row in zip(places, self.totals, strict=True):
            for i, variable in enumerate(of_row):
                value = self.f.at.load(variable)
                self.f.store(value, place, 4 * self.table.lanes * i)

    def add(self, source: Source, x: Sequence[Any], scales: Any, runs: Runs) -> None:
        """Adds runs to the totals.

        Args:
            source: the floats of the panel.
            x: a pointer to each row.
            scales: pointer to scales, ``(tiles, PANEL)``.
            runs: the runs.
        """
        f, at = self.f, self.f.at
        left = at.srem(at.sub(runs.stop, runs.first), f.long(self.together))
        whole = at.sub(runs.stop, left)
        with (
            f.if_any(runs.first, whole),
            f.loop(runs.first, whole, self.together) as one,
        ):
            self._add_together(source, x, scales, runs, one, self.together)
        if self.together > 1:
            with f.if_any(whole, runs.stop), f.loop(whole, runs.stop) as one:
                self._add_together(source, x, scales, runs, one, 1)

    def _add_together(
        self,
        source: Source,
        x: Sequence[Any],
        scales: Any,
        runs: Runs,
        first: Any,
        count: int,
    ) -> None:
        f, at, sums = self.f, self.f.at, self.sums[:count]
        for variable in (one for run in sums for row in run for one in row):
            at.store(f.constant(self.table.floats, 0.0), variable)
        with f.loop(0, self.run, STEP) as step:
            starts = [
                f.sum(f.times(f.sum(first, i), self.run), step) for i in range(count)
            ]
            vectors = [source.read(start) for start in starts]
            for k in range(STEP):
                for of_run, start, floats in zip(sums, starts, vectors, strict=True):
                    self._multiply(
                        of_run, x, f.sum(f.times(start, 4), 4 * k), floats[k]
                    )
        for i, of_run in enumerate(sums):
            self._scale(of_run, scales, f.sum(first, i), runs.of_tile)

    def _multiply(
        self, sums: Any, x: Sequence[Any], place: Any, floats: list[Any]
    ) -> None:
        f, at = self.f, self.f.at
        for pointer, of_row in zip(x, sums, strict=True):
            value = f.load(pointer, place, f.ir.FloatType(), 4)
            value = f.splat(value, self.table.lanes)
            for variable, weight in zip(of_row, floats, strict=True):
                at.store(self._fused(value, weight, at.load(variable)), variable)

    def _scale(self, sums: Any, scales: Any, run: Any, of_tile: Any) -> None:
        f, at = self.f, self.f.at
        # Of 32 bits, a division takes less time.
        tile = at.udiv(at.trunc(run, f.int), at.trunc(of_tile, f.int))
        start = f.times(at.zext(tile, f.long), 4 * PANEL)
        for i in self.table.vectors:
            place = f.sum(start, 4 * self.table.lanes * i)
            scale = f.load(scales, place, self.table.floats)
            for of_row, totals in zip(sums, self.totals, strict=True):
                found = self._fused(at.load(of_row[i]), scale, at.load(totals[i]))
                at.store(found, totals[i])

    def _fused(self, a: Any, b: Any, c: Any) -> Any:
        name = f"llvm.fma.v{self.table.lanes}f32"
        return self.f.call(name, self.table.floats, a, b, c)

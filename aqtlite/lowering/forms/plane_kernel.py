"""What kernels of integers in planes of bytes (`planes`) share, for x86-64.

`plane_channels` sums over channels, as queries by keys, and `plane_positions` over
positions, as probabilities by values. Both unpack integers in registers, raise them to
unsigned ones, and multiply those by int8. `plane_products` calls them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from aqtlite.lowering.forms import custom_call, planes
from aqtlite.lowering.forms.integer_products import Instructions

# Number of products that are added before the sums are widened.
_STEPS = 8

Terms = Callable[[Any], Sequence[tuple[Any, Any]]]
"""The factors of each sum at a step, uint8 and int8 in vectors of int32."""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Pointers of a call."""

    packed: Any
    x: Any
    """The other operand."""

    starts: Any
    """What raising the integers adds to the sums of a row, negated, int32."""

    out: Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call."""

    batch: Any
    rows: Any
    """Rows of the other operand."""

    bytes: Any
    """Bytes of a position."""

    length: Any
    """Positions."""

    products: Any
    """Elements of a row of the other operand."""

    columns: Any
    """Columns of the result."""


class PlaneFunction(custom_call.Function):
    """Writes a kernel.

    Its arguments are the planes, ``(*batch, bytes, length)``, and the other operand,
    int8, ``(*batch, rows, products)``; its result is int32, ``(*batch, rows,
    columns)``.
    """

    words = len(dataclasses.fields(Arrays)) + len(dataclasses.fields(Sizes))

    def __init__(self, bits: int, instructions: Instructions):
        self.bits, self.how = bits, instructions
        self.slabs, self.blocks = planes.pieces(bits), range(planes.blocks(bits))
        self.products = instructions.products
        super().__init__()

    @abc.abstractmethod
    def units(self, sizes: Sizes) -> tuple[Any, Any]:
        """Returns the number of parts of a batch that threads divide, and the work of
        one, as a number of products."""

    @abc.abstractmethod
    def compute_units(
        self, arrays: Arrays, sizes: Sizes, start: Any, stop: Any
    ) -> None:
        """Computes parts of the result."""

    @property
    def ints(self) -> Any:
        """The vectors of int32."""
        return self.how.ints(self)

    @property
    def width(self) -> int:
        """The number of bytes in a vector."""
        return 4 * self.how.lanes

    def memory(self, frame):
        sizes = self._sizes(frame)
        return self.times(sizes.batch, sizes.rows, 4)

    def prepare(self, frame, state, memory):
        sizes = self._sizes(frame)
        packed, x = (self.data(self.argument(frame, i)) for i in range(2))
        out = self.data(self.result(frame))
        for i, value in enumerate((packed, x, memory, out, *vars(sizes).values())):
            self.store(value, state, 8 * i, 8)
        with self.loop(0, self.times(sizes.batch, sizes.rows)) as row:
            line = self.offset(x, self.times(row, sizes.products))
            total = self._sum(line, sizes.products)
            raised = self.at.mul(total, self.int(-(2 ** (self.bits - 1))))
            self.store(raised, memory, self.times(row, 4), 4)
        count, work = self.units(sizes)
        return self.times(sizes.batch, count), work

    def compute(self, state, start, stop):
        pointers = len(dataclasses.fields(Arrays))
        arrays = Arrays(*(self.word(state, i, self.pointer) for i in range(pointers)))
        sizes = Sizes(*(self.word(state, i) for i in range(pointers, self.words)))
        self.compute_units(arrays, sizes, start, stop)

    def _sizes(self, frame: Any) -> Sizes:
        packed, x = (self.argument(frame, i) for i in range(2))
        rank = self.rank(packed)
        last, before = self.sum(rank, -1), self.sum(rank, -2)
        batch = self.variable(self.long)
        self.at.store(self.long(1), batch)
        with self.loop(0, before) as axis:
            size = self.size(packed, axis)
            self.at.store(self.times(self.at.load(batch), size), batch)
        return Sizes(
            self.at.load(batch),
            self.size(x, before),
            self.size(packed, before),
            self.size(packed, last),
            self.size(x, last),
            self.size(self.result(frame), last),
        )

    def _sum(self, x: Any, count: Any) -> Any:
        """The sum of int8."""
        at, lanes = self.at, 8
        wide, narrow = (self.ir.VectorType(one, lanes) for one in (self.int, self.byte))
        total, rest = self.variable(wide), self.variable(self.int)
        at.store(self.constant(wide, 0), total)
        at.store(self.int(0), rest)
        whole = at.and_(count, self.long(-lanes))
        with self.if_any(0, whole), self.loop(0, whole, lanes) as i:
            values = at.sext(self.load(x, i, narrow), wide)
            at.store(at.add(at.load(total), values), total)
        with self.if_any(whole, count), self.loop(whole, count) as i:
            value = at.sext(self.load(x, i, self.byte), self.int)
            at.store(at.add(at.load(rest), value), rest)
        return at.add(self.added(at.load(total)), at.load(rest))

    def divided(self, x: Any, by: int) -> Any:
        """A quotient, rounded down."""
        return self.at.sdiv(x, self.long(by))

    def added(self, x: Any) -> Any:
        """The sum of a vector of int32."""
        name = f"llvm.vector.reduce.add.v{x.type.count}i32"
        return self.call(name, self.int, x)

    def unpacked(self, blocks: Sequence[Any]) -> list[Any]:
        """The integers of each slab, raised by 2^(bits - 1).

        Args:
            blocks: a vector of bytes of each block.
        """
        # To raise an integer is to flip its upper bit.
        upper = [0 for _ in blocks]
        for *_, last in self.slabs:
            upper[last.block] |= 1 << (last.place + last.width - 1)
        raised = [
            self.at.xor(x, self._of_bytes(byte)) if byte else x
            for x, byte in zip(blocks, upper, strict=True)
        ]
        return [
            functools.reduce(
                self.at.or_, [self._piece(raised[one.block], one) for one in slab]
            )
            for slab in self.slabs
        ]

    def _piece(self, x: Any, piece: planes.Piece) -> Any:
        """The bits of a piece, in the place that they have in an integer."""
        shift = piece.place - piece.lowest
        if shift:
            move = self.at.lshr if shift > 0 else self.at.shl
            x = move(x, self.constant(self.ints, abs(shift)))
        mask = (2**piece.width - 1) << piece.lowest
        return self.at.and_(x, self._of_bytes(mask))

    def _of_bytes(self, value: int) -> Any:
        return self.constant(self.ints, value * 0x01010101)

    def accumulate(self, totals: Sequence[Any], count: Any, terms: Terms) -> None:
        """Adds the products of steps to sums, which are variables."""
        whole = self.at.and_(count, self.long(-_STEPS))
        with self.if_any(0, whole), self.loop(0, whole, _STEPS) as step:
            self.add(totals, _STEPS, lambda i: terms(self.sum(step, i)))
        with self.if_any(whole, count), self.loop(whole, count) as step:
            self.add(totals, 1, lambda i: terms(self.sum(step, i)))

    def add(self, totals: Sequence[Any], count: int, terms: Terms) -> None:
        """Adds the products of some steps to sums, and widens them once."""
        before = [self.at.load(one) for one in totals]
        parts = [self.products.started(one) for one in before]
        for i in range(count):
            parts = [
                self.products.multiplied(self, part, a, b)
                for part, (a, b) in zip(parts, terms(i), strict=True)
            ]
        for place, total, part in zip(totals, before, parts, strict=True):
            self.at.store(self.products.finished(self, total, part), place)

    def by_rows(
        self, rows: Any, at_once: int, body: Callable[[Any, int], None]
    ) -> None:
        """Runs a body for rows, several at once as long as there are so many."""
        done = self.long(0)
        for count in dict.fromkeys((at_once, 1)):
            left = self.at.srem(self.at.sub(rows, done), self.long(count))
            after = self.at.sub(rows, left)
            with self.if_any(done, after), self.loop(done, after, count) as row:
                body(row, count)
            done = after


def registered(kind: type[PlaneFunction], bits: int, instructions: Instructions) -> str:
    """Compiles a kernel, and returns the name of its custom call."""
    name = f"aqtlite_planes_{kind.__name__}_{bits}_{int(instructions)}"
    custom_call.register(name, lambda: kind(bits, instructions))
    return name

"""Instructions of x86-64 that multiply integers, and add neighbouring products."""

import abc
import enum
from typing import Any

import numpy as np

from aqtlite.lowering.forms import custom_call, processor
from aqtlite.lowering.forms.panels import PANEL

_STEPS = 8
"""Number of calls of `Products.multiplied` for a block of 32 products."""


class Instructions(enum.IntEnum):
    """By which instructions a kernel multiplies."""

    AVX2 = 0
    """Two products to an int16."""

    AVX_VNNI = 1
    """Four products to an int32, of vectors of 256 bits."""

    AVX512_VNNI = 2
    """Of 512 bits, with twice the registers."""

    AVX2_INT16 = 3
    """AVX2, two products of int16 to an int32. Weights are widened, and the two highest
    digits of a float are one number."""

    AMX = 4
    """64 products each of 16 rows with 16 columns."""

    @property
    def block(self) -> int:
        """The number of products that are summed before the sums are widened."""
        return 64 if self is Instructions.AMX else 32

    @property
    def has_dots(self) -> bool:
        """Whether four products are added to an int32 (VNNI)."""
        return self is Instructions.AVX_VNNI or self.has_512_bits

    @property
    def has_512_bits(self) -> bool:
        """Whether vectors have 512 bits."""
        return self in (Instructions.AVX512_VNNI, Instructions.AMX)

    @property
    def takes_int16(self) -> bool:
        """Whether operands are int16; they are uint8 and int8 otherwise."""
        return self is Instructions.AVX2_INT16

    @property
    def number_size(self) -> int:
        """Bytes of a number that weights are multiplied by."""
        return 2 if self.takes_int16 else 1

    @property
    def products(self) -> "Products":
        """How products are added."""
        if self.takes_int16:
            return ProductsOfInt16()
        return Dots() if self.has_dots else SmallProducts()

    def parts(self, bits: int) -> int:
        """The number of parts that an int8 is split into, each of fewer bits.

        `SmallProducts` take only one of both operands whole.

        Args:
            bits: bits of the weight that it is multiplied by.
        """
        is_small = self is Instructions.AVX2 and bits == 8
        return 2 if is_small else 1

    def numbers(self, digits: int) -> int:
        """The number of numbers that are multiplied, of an element of some digits.

        The two highest digits are one int16.
        """
        return digits - 1 if self.takes_int16 else digits

    @property
    def lanes(self) -> int:
        """The number of int32 in a vector."""
        return 16 if self.has_512_bits else 8

    @property
    def vectors(self) -> int:
        """The number of vectors with a word of each row of a panel."""
        return PANEL // self.lanes

    def rows_at_once(self, lines: int) -> tuple[int, ...]:
        """The numbers of rows whose sums stay in registers, from the largest to one.

        Args:
            lines: number of sums of a row and a column.
        """
        registers = 16 if self.has_512_bits else 6
        if not self.has_dots:
            return tuple(dict.fromkeys((registers // lines, 1)))
        largest = 1 << ((registers // lines).bit_length() - 1)
        return tuple(dict.fromkeys((largest, min(4, largest), 1)))

    def ints(self, f: custom_call.Function) -> Any:
        return f.ir.VectorType(f.int, self.lanes)

    def floats(self, f: custom_call.Function) -> Any:
        return f.ir.VectorType(f.ir.FloatType(), self.lanes)


class Products(abc.ABC):
    """How products are added."""

    is_wide: bool
    """Whether a sum is int32 at once, and one addition waits for the one before it."""

    @abc.abstractmethod
    def multiplied(self, f: custom_call.Function, part: Any, a: Any, b: Any) -> Any:
        """Adds the products of numbers that are several in an int32.

        Args:
            f: function that is being written.
            part: what `started` or `multiplied` returned.
            a: four uint8 or two int16 in each int32 of a vector.
            b: four int8 or two int16.
        """

    def started(self, total: Any) -> Any:
        """Returns what `multiplied` adds to, at first, of a sum so far, int32."""
        return total

    def finished(self, f: custom_call.Function, total: Any, part: Any) -> Any:
        """Returns the sum with what up to `steps` calls of `multiplied` have added."""
        del f, total
        return part

    def steps(self, largest: int) -> int:
        """The number of calls of `multiplied` before a sum is `finished`.

        Args:
            largest: largest magnitude of a product.
        """
        del largest
        return _STEPS


class Dots(Products):
    """VNNI: four products are added to an int32."""

    is_wide = True

    def multiplied(self, f, part, a, b):
        kind = a.type
        name = f"llvm.x86.avx512.vpdpbusd.{32 * kind.count}"
        return f.call(name, kind, part, *(_divided(f, x, 8) for x in (a, b)))


class SmallProducts(Products):
    """AVX2, of uint8 or int8 of four bits: two products are added to an int16."""

    is_wide = False

    def started(self, total):
        return None

    def multiplied(self, f, part, a, b):
        a, b = (_divided(f, x, 8) for x in (a, b))
        halves = f.ir.VectorType(f.ir.IntType(16), a.type.count // 2)
        one = f.call("llvm.x86.avx2.pmadd.ub.sw", halves, a, b)
        # LLVM would add in another order, for which there are too few registers.
        return f.opaque(one if part is None else f.at.add(part, one))

    def finished(self, f, total, part):
        ones = f.constant(part.type, 1)
        return f.at.add(total, f.call("llvm.x86.avx2.pmadd.wd", total.type, part, ones))

    def steps(self, largest):
        # Eight times two products of 15 * 128 or of 255 * 8 fit 16 bits.
        fitting = np.iinfo(np.int16).max // (2 * largest)
        return min(_STEPS, 1 << (fitting.bit_length() - 1))


class ProductsOfInt16(Products):
    """AVX2, of int16: two products are added, and their sum to an int32."""

    is_wide = True

    def multiplied(self, f, part, a, b):
        a, b = (_divided(f, x, 16) for x in (a, b))
        two = f.call("llvm.x86.avx2.pmadd.wd", part.type, a, b)
        return f.at.add(part, two)


def _divided(f: custom_call.Function, x: Any, bits: int) -> Any:
    """Returns a vector of int32 as one of integers of fewer bits."""
    kind = f.ir.VectorType(f.ir.IntType(bits), x.type.count * 32 // bits)
    return f.at.bitcast(x, kind)


def of_processor() -> Instructions | None:
    """The instructions that XLA may use; None without AVX2."""
    if not processor.multiplies_bytes():
        return None
    if not processor.adds_products_of_bytes():
        return Instructions.AVX2
    if not processor.has_avx512_vnni():
        return Instructions.AVX_VNNI
    return Instructions.AMX if processor.may_use_amx() else Instructions.AVX512_VNNI

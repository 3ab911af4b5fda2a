"""Instructions of x86-64 that multiply uint8 by int8, and add neighbouring products."""

import abc
import enum
from typing import Any

from aqtlite.lowering.forms import custom_call, processor
from aqtlite.lowering.forms.panels import PANEL


class Instructions(enum.IntEnum):
    """The widest instructions of a processor."""

    AVX2 = 0
    """Two products to an int16."""

    AVX_VNNI = 1
    """Four products to an int32, of vectors of 256 bits."""

    AVX512_VNNI = 2
    """Of 512 bits, with twice the registers."""

    @property
    def has_dots(self) -> bool:
        """Whether four products are added to an int32 (VNNI)."""
        return self is not Instructions.AVX2

    def products(self, bits: int) -> "Products":
        """How uint8 of a number of bits are multiplied by int8."""
        if self.has_dots:
            return Dots()
        return SmallProducts() if bits == 4 else WidenedProducts()

    @property
    def lanes(self) -> int:
        """The number of int32 in a vector."""
        return 16 if self is Instructions.AVX512_VNNI else 8

    @property
    def vectors(self) -> int:
        """The number of vectors with a word of each row of a panel."""
        return PANEL // self.lanes

    def rows_at_once(self, digits: int) -> tuple[int, ...]:
        """The numbers of rows whose sums stay in registers, from the largest to one."""
        lines = 16 if self is Instructions.AVX512_VNNI else 6
        largest = 1 << ((lines // digits).bit_length() - 1)
        return tuple(dict.fromkeys((largest, min(4, largest), 1)))

    def ints(self, f: custom_call.Function) -> Any:
        return f.ir.VectorType(f.int, self.lanes)

    def floats(self, f: custom_call.Function) -> Any:
        return f.ir.VectorType(f.ir.FloatType(), self.lanes)


class Products(abc.ABC):
    """How products of uint8 by int8 are added."""

    is_wide: bool
    """Whether a sum is int32 at once, and one addition waits for the one before it."""

    @abc.abstractmethod
    def multiplied(self, f: custom_call.Function, part: Any, a: Any, b: Any) -> Any:
        """Adds the products of uint8 by int8, each four in an int32.

        Args:
            f: function that is being written.
            part: what `started` or `multiplied` returned.
            a: uint8 in a vector of int32.
            b: int8, likewise.
        """

    def started(self, total: Any) -> Any:
        """Returns what `multiplied` adds to, at first, of a sum so far, int32."""
        return total

    def finished(self, f: custom_call.Function, total: Any, part: Any) -> Any:
        """Returns the sum with what up to eight calls of `multiplied` have added."""
        del f, total
        return part


class Dots(Products):
    """VNNI: four products are added to an int32."""

    is_wide = True

    def multiplied(self, f, part, a, b):
        kind = a.type
        name = f"llvm.x86.avx512.vpdpbusd.{32 * kind.count}"
        return f.call(name, kind, part, *(_divided(f, x, 8) for x in (a, b)))


class SmallProducts(Products):
    """AVX2, of uint8 that are at most 15: two products are added to an int16."""

    is_wide = False

    def started(self, total):
        return None

    def multiplied(self, f, part, a, b):
        # Two products are at most 2 * 15 * 128, and eight times that fits 16 bits.
        a, b = (_divided(f, x, 8) for x in (a, b))
        halves = f.ir.VectorType(f.ir.IntType(16), a.type.count // 2)
        one = f.call("llvm.x86.avx2.pmadd.ub.sw", halves, a, b)
        return one if part is None else f.at.add(part, one)

    def finished(self, f, total, part):
        ones = f.constant(part.type, 1)
        return f.at.add(total, _added_pairs(f, total.type, part, ones))


class WidenedProducts(Products):
    """AVX2, of any uint8: even and odd bytes are widened to int16."""

    is_wide = True

    def multiplied(self, f, part, a, b):
        at, kind = f.at, a.type
        a, b = (_divided(f, x, 16) for x in (a, b))
        byte, low = f.constant(a.type, 8), f.constant(a.type, 0xFF)
        even = at.and_(a, low), at.ashr(at.shl(b, byte), byte)
        odd = at.lshr(a, byte), at.ashr(b, byte)
        for one, other in (even, odd):
            part = at.add(part, _added_pairs(f, kind, one, other))
        return part


def _divided(f: custom_call.Function, x: Any, bits: int) -> Any:
    """Returns a vector of int32 as one of integers of fewer bits."""
    kind = f.ir.VectorType(f.ir.IntType(bits), x.type.count * 32 // bits)
    return f.at.bitcast(x, kind)


def _added_pairs(f: custom_call.Function, kind: Any, a: Any, b: Any) -> Any:
    """Multiplies int16 by int16, and adds neighbours to int32."""
    return f.call("llvm.x86.avx2.pmadd.wd", kind, a, b)


def of_processor() -> Instructions | None:
    """The instructions that XLA may use; None without AVX2."""
    if not processor.multiplies_bytes():
        return None
    if not processor.adds_products_of_bytes():
        return Instructions.AVX2
    has_512 = processor.has_avx512_vnni()
    return Instructions.AVX512_VNNI if has_512 else Instructions.AVX_VNNI

"""Instructions of x86-64 that multiply uint8 by int8, and add neighbouring products."""

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

    def started(self, total: Any) -> Any:
        """Returns what `multiplied` adds to, at first, of a sum so far, int32."""
        return total if self.has_dots else None

    def multiplied(self, f: custom_call.Function, part: Any, a: Any, b: Any) -> Any:
        """Adds the products of uint8 by int8, each four in an int32.

        Without `has_dots`, the uint8 are at most 15.
        """
        kind = a.type
        a, b = (
            f.at.bitcast(x, f.ir.VectorType(f.byte, 4 * kind.count)) for x in (a, b)
        )
        if self.has_dots:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * kind.count}"
            return f.call(name, kind, part, a, b)
        halves = f.ir.VectorType(f.ir.IntType(16), 2 * kind.count)
        # Two products are at most 2 * 15 * 128, and eight times that fits 16 bits.
        one = f.call("llvm.x86.avx2.pmadd.ub.sw", halves, a, b)
        return one if part is None else f.at.add(part, one)

    def finished(self, f: custom_call.Function, total: Any, part: Any) -> Any:
        """Returns the sum with what up to eight calls of `multiplied` have added."""
        if self.has_dots:
            return part
        ones = f.constant(part.type, 1)
        wide = f.call("llvm.x86.avx2.pmadd.wd", total.type, part, ones)
        return f.at.add(total, wide)


def of_processor() -> Instructions | None:
    """The instructions that XLA may use; None without AVX2."""
    if not processor.multiplies_bytes():
        return None
    if not processor.adds_products_of_bytes():
        return Instructions.AVX2
    has_512 = processor.has_avx512_vnni()
    return Instructions.AVX512_VNNI if has_512 else Instructions.AVX_VNNI

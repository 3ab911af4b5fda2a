"""What the bits of a weight mean to the kernel of `panel_products`.

Codes of float4_e2m1fn are a sign, and a place among eight magnitudes. Twice their
values are integers, so that their sums are exact, too. In registers, a byte for each of
16 codes is looked up.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering.forms import custom_call, panels
from aqtlite.shapes.sharding import looked_up

MAGNITUDES = 0, 1, 2, 3, 4, 6, 8, 12
"""The magnitudes of float4_e2m1fn by the smallest, which is a half."""

_OF_CODES = *MAGNITUDES, *(-value for value in MAGNITUDES)

_SIZES = {32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
"""Instructions that look up bytes, by those of a vector."""


class Coding(enum.IntEnum):
    """What the bits of a weight mean."""

    INTEGERS = 0
    """An integer."""

    E2M1 = 1
    """A code of float4_e2m1fn, of 4 bits, for twice its value."""

    def raised_by(self, bits: int) -> int:
        """What is added to weights of some bits, so that they are unsigned."""
        return MAGNITUDES[-1] if self is Coding.E2M1 else 2 ** (bits - 1)

    def largest(self, bits: int) -> int:
        """The largest weight of some bits, raised."""
        of_codes = 2 * MAGNITUDES[-1]
        return of_codes if self is Coding.E2M1 else 2**bits - 1

    def decoded(self, weights: jax.Array) -> jax.Array:
        """Returns the integers of weights.

        Args:
            weights: int4 or int8, of 4 bits if they are codes.
        """
        if self is Coding.INTEGERS:
            return weights
        places = weights.astype(jnp.int8) & np.int8(len(_OF_CODES) - 1)
        table = jnp.asarray(_OF_CODES, jnp.int8)
        return looked_up(table, places.astype(jnp.uint8))

    def unpacked(self, f: custom_call.Function, x: Any) -> tuple[Any, Any]:
        """Writes the instructions that raise the weights of the halves of bytes.

        Args:
            f: function that is being written.
            x: vector of int32 of a panel of weights of 4 bits.

        Returns:
            The lower and the upper halves, as bytes.
        """
        low, high = panels.nibbles(f, x)
        if self is Coding.INTEGERS:
            return low, high
        return _looked_up(f, low), _looked_up(f, high)


def _looked_up(f: custom_call.Function, codes: Any) -> Any:
    """The raised weights of codes with flipped signs, in bytes of a vector of int32."""
    size = 4 * codes.type.count
    kind = f.ir.VectorType(f.byte, size)
    places = range(len(_OF_CODES))
    raised = [_OF_CODES[place ^ panels.SIGN] + MAGNITUDES[-1] for place in places]
    # The instructions have a table for each 128 bits.
    table = f.ir.Constant(kind, raised * (size // len(raised)))
    bytes_of_codes = f.at.bitcast(codes, kind)
    found = f.call(f"llvm.x86.{_SIZES[size]}", kind, table, bytes_of_codes)
    return f.at.bitcast(found, codes.type)

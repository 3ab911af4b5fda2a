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

_DOUBLED = 0, 1, 2, 3, 4, 6, 8, 12
"""Twice the magnitudes of float4_e2m1fn."""

_OF_CODES = *_DOUBLED, *(-value for value in _DOUBLED)

_SIGN = 8
"""The bit of a code that is flipped in panels."""

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
        return _DOUBLED[-1] if self is Coding.E2M1 else 2 ** (bits - 1)

    def largest(self, bits: int) -> int:
        """The largest weight of some bits, raised."""
        of_codes = 2 * _DOUBLED[-1]
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
    raised = [
        _OF_CODES[place ^ _SIGN] + _DOUBLED[-1] for place in range(len(_OF_CODES))
    ]
    # The instructions have a table for each 128 bits.
    table = f.ir.Constant(kind, raised * (size // len(raised)))
    places = f.at.bitcast(codes, kind)
    found = f.call(f"llvm.x86.{_SIZES[size]}", kind, table, places)
    return f.at.bitcast(found, codes.type)

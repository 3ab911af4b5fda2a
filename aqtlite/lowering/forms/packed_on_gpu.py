"""Products of fp8 weights that are laid out before the call, on GPUs.

cuBLASLt takes both operands with their contracting axis last (`gpu`). Weights of fp8
are stored with theirs first, and each call would transpose them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.forms import layouts
from aqtlite.lowering.packing import Packing


def reads_float8(eqn: Any) -> bool:
    """Returns True if an equation reads floats of 8 bits, and may contract them."""
    return any(_is_float8(atom.aval.dtype) for atom in eqn.invars)


def packing_of(eqn: Any, known: frozenset[int]) -> Packing | None:
    """Returns how to lay out an argument of an equation; None if it is no such weight.

    Args:
        eqn: a `lax.dot_general`, in the form for GPUs.
        known: indices of its arguments that are known before the call.
    """
    if len(known) != 1 or "dimension_numbers" not in eqn.params:
        return None
    (argument,) = known
    x, (contracting, _) = eqn.invars[argument].aval, eqn.params["dimension_numbers"]
    if not (_is_float8(x.dtype) and layouts.is_last(x.ndim, contracting[argument])):
        return None
    return _LaidOut(argument, eqn.params)


def _is_float8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8


@dataclasses.dataclass(frozen=True)
class _LaidOut(Packing):
    """A product of an operand that is computed, in its layout, before the call."""

    argument: int
    params: Mapping[str, Any]
    """Parameters of the `lax.dot_general`."""

    @property
    def layout(self):
        return type(self)

    def pack(self, args):
        return (args[self.argument],)

    def run(self, packed, args):
        lhs, rhs = packed[0], args[1]
        if self.argument == 1:
            lhs, rhs = args[0], packed[0]
        return lax.dot_general(
            lhs,
            rhs,
            self.params["dimension_numbers"],
            precision=self.params["precision"],
            preferred_element_type=self.params["preferred_element_type"],
        )

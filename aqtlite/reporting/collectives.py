"""What devices exchange in a compiled program."""

import dataclasses
from collections.abc import Callable

from aqtlite.reporting.hlo import Module

_OPS = frozenset(
    {
        *("all-gather", "all-reduce", "all-to-all", "collective-broadcast"),
        *("collective-permute", "ragged-all-to-all", "reduce-scatter"),
    }
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between devices."""

    op: str
    """As XLA names it: "all-gather", "all-reduce", ..."""

    dtype: str
    """Dtype of what travels."""

    bytes: int
    """Bytes of its result on one device, or of its operand if that has more."""

    times: int
    """How often it runs in a call, as far as trip counts are known."""

    path: str
    """Path of the contraction in whose scope it is; empty for none."""


def find(module: Module, path_of: Callable[[str], str]) -> list[Collective]:
    """Returns the collectives of a program, in its order.

    Args:
        module: the program.
        path_of: function from what JAX calls an operation to the path of the
            contraction around it.
    """
    found = []
    for run in module.runs():
        for one in run.computation.instructions.values():
            op = one.opcode.removesuffix("-start")
            if op not in _OPS or not one.types:
                continue
            given = [run.computation.operand(one, i) for i in range(len(one.operands))]
            size = sum(x.bytes for x in given if x is not None)
            # The start of an exchange returns its operands, too.
            result = one.bytes - size if one.opcode != op else one.bytes
            path = path_of(one.op_name) if one.op_name else ""
            dtype = one.types[0].dtype
            found.append(Collective(op, dtype, max(size, result), run.times, path))
    return found

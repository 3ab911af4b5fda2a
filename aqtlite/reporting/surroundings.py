"""What a compiled program does around contractions: passes over their operands."""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aqtlite.reporting.hlo import Instruction, Module

_OF_RANGES = frozenset({"maximum", "minimum"})


class Around(NamedTuple):
    """Passes in the scope of a contraction, in a call."""

    range_reductions: int = 0
    """Those that find a maximum or a minimum, as of a calibration."""

    transpositions: int = 0
    """Those that move axes."""


def find(
    module: Module, indices_of: Callable[[str], Sequence[int]]
) -> dict[int, Around]:
    """Returns what surrounds contractions, by index.

    A fusion with several reductions is one pass, as that of a maximum in two steps is.

    Args:
        module: the program.
        indices_of: function from what JAX calls an operation to the contractions around
            it: several, if they have one scope.
    """
    reductions: collections.Counter[int] = collections.Counter()
    transpositions: collections.Counter[int] = collections.Counter()
    seen = set()
    for run in module.runs():
        for one in run.computation.instructions.values():
            counted = transpositions
            if _finds_range(one, module):
                counted = reductions
            elif one.opcode != "transpose" and not _copies_transposed(one):
                continue
            top = one.name if run.fusion is None else run.fusion.name
            op_name = run.op_name(one)
            for index in indices_of(op_name) if op_name else ():
                key = top, index, counted is reductions
                if key not in seen:
                    seen.add(key)
                    counted[index] += run.times
    return {
        i: Around(reductions[i], transpositions[i])
        for i in reductions.keys() | transpositions.keys()
    }


def _finds_range(one: Instruction, module: Module) -> bool:
    """Whether an instruction reduces to a maximum or a minimum."""
    if one.opcode != "reduce":
        return False
    names = one.called.get("to_apply", ())
    inside = [module.computations[x] for x in names if x in module.computations]
    opcodes = {x.opcode for body in inside for x in body.instructions.values()}
    return bool(opcodes & _OF_RANGES) and opcodes <= _OF_RANGES | {"parameter"}


def _copies_transposed(one: Instruction) -> bool:
    return one.opcode == "copy" and one.op_name.endswith("/transpose")

"""What a compiled program does around contractions: passes over their operands."""

import collections
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from aqtlite.reporting.hlo import Instruction, Module

Kind = Literal["range", "move"]

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
    counts: collections.Counter[tuple[int, Kind]] = collections.Counter()
    for run in module.runs():
        seen = set()  # A body that is called twice passes twice.
        for one in run.computation.instructions.values():
            kind, op_name = _kind(one, module), run.op_name(one)
            if kind is None or not op_name:
                continue
            top = one.name if run.fusion is None else run.fusion.name
            for index in indices_of(op_name):
                if (top, index, kind) not in seen:
                    seen.add((top, index, kind))
                    counts[index, kind] += run.times
    return {i: Around(counts[i, "range"], counts[i, "move"]) for i, _ in counts}


def _kind(one: Instruction, module: Module) -> Kind | None:
    """Returns what a pass does, if it is counted."""
    if _finds_range(one, module):
        return "range"
    is_copy = one.opcode == "copy" and one.op_name.endswith("/transpose")
    return "move" if one.opcode == "transpose" or is_copy else None


def _finds_range(one: Instruction, module: Module) -> bool:
    """Whether an instruction reduces to a maximum or a minimum."""
    if one.opcode != "reduce":
        return False
    names = one.called.get("to_apply", ())
    inside = [module.computations[x] for x in names if x in module.computations]
    opcodes = {x.opcode for body in inside for x in body.instructions.values()}
    return bool(opcodes & _OF_RANGES) and opcodes <= _OF_RANGES | {"parameter"}

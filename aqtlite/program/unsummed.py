"""Contractions that rules leave in float, because none of their sums adds anything.

Quantization is for sums of many products, whose rounding errors average out and which
integers make fast. A product alone only loses by it.
"""

from aqtlite.jaxpr.recognition import one_hot, producers
from aqtlite.operations import SIDES
from aqtlite.program.planned import PlannedContraction

SUMS_NOTHING = "it sums nothing: each element of the result is one product"
SUMS_ONE = "each sum has one element"
MOVES_DATA = "each sum has one element that is not zero: data that is only moved"

_REASONS = frozenset({SUMS_NOTHING, SUMS_ONE, MOVES_DATA})


def why(one: PlannedContraction, program: producers.Body) -> str | None:
    """Returns why there is nothing to quantize in a contraction, or None.

    Args:
        one: the contraction, of floats.
        program: the program that contains it.
    """
    alone = why_alone(one)
    if alone is not None:
        return alone
    operation, *_ = one.types()
    for side in SIDES:
        # In a convolution, an element of lhs is in sums with several elements of rhs.
        if side == "lhs" and not operation.pairs_elements and one.op != "ragged_dot":
            continue
        index = one.index(side)
        axes = operation.axes(side).contracting
        is_constant = not one.site.operands[index].needed
        if one_hot.is_one_hot(
            program, one.site.location, index, axes, is_constant=is_constant
        ):
            return MOVES_DATA
    return None


def why_alone(one: PlannedContraction) -> str | None:
    """Returns why there is nothing to quantize, by its axes and shapes alone."""
    operation, _, rhs = one.types()
    if operation.sums_nothing:
        return SUMS_NOTHING
    return SUMS_ONE if operation.sums_one(rhs.shape) else None


def is_reason(why_float: str | None) -> bool:
    """Whether a contraction stays in float for one of these reasons."""
    return why_float in _REASONS

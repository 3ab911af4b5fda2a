"""Recognizes contractions in the rule of a gradient: what they are of the function's.

The gradient of a contraction with respect to one operand contracts the gradient of its
result with the other operand, along the axes that only the latter has. Values are the
same if they are computed equally from the function's inputs, up to transposition.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from aqtlite.jaxpr.rule_sites import InCall
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import SIDES, DotGeneral, OperandAxes, Side
from aqtlite.program.gradient_rules import convolutions_in_rules, ragged_dots_in_rules


@dataclasses.dataclass(frozen=True)
class Again:
    """A contraction in a rule that is one of the function, computed again."""

    site: Site
    number: int
    """Number of the contraction among those of the function."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A contraction in a rule that is the gradient of one of the function's."""

    site: Site
    number: int
    """Number of the contraction among those of the function."""

    side: Side
    """Operand whose gradient it gives, in the order of the function's equation."""

    index: Literal[0, 1]
    """Which of its operands is made of the gradient of the result."""


def recognized(one: Site, within: InCall) -> Again | Gradient | None:
    """Recognizes a contraction in a rule.

    Args:
        one: contraction in one of the rules.
        within: all contractions of the call.
    """
    depends = [bool(x.inputs & within.gradients) for x in one.operands]
    for number, site in enumerate(within.function):
        if site.operation != one.operation or site.lengths != one.lengths:
            continue
        if not any(depends):
            if _is_again(one, site):
                return Again(one, number)
        elif not all(depends):
            index: Literal[0, 1] = 1 if depends[1] else 0
            side = _SIDES_OF[one.operation](one, site, index)
            if side is not None:
                return Gradient(one, number, side, index)
    return None


def _is_again(one: Site, site: Site) -> bool:
    same = [x.identity for x in one.operands] == [x.identity for x in site.operands]
    are_known = all(x.identity is not None for x in one.operands)
    return same and are_known and str(one.eqn.params) == str(site.eqn.params)


def _side_of_dot(one: Site, site: Site, index: int) -> Side | None:
    """Returns the operand whose gradient a contraction in a rule gives, if any.

    Args:
        one: contraction in the rule.
        site: contraction of the function.
        index: which operand of `one` depends on the gradient of a result.
    """
    other = one.untransposed(1 - index)
    for side in SIDES:
        kept = site.untransposed(1 - SIDES.index(side))
        if other is None or kept is None or kept.identity != other.identity:
            continue
        alike = tuple(map(kept.permutation.index, other.permutation))
        if _contracts(one, site, side, index, alike):
            return side
    return None


def _contracts(
    one: Site, site: Site, side: Side, index: int, alike: Sequence[int]
) -> bool:
    """Whether a contraction in a rule is along the axes of a gradient.

    Mapped by `jax.vmap`, it may leave axes of examples for a sum behind it.

    Args:
        one: contraction in the rule.
        site: contraction of the function.
        side: operand of `site` that may be the one whose gradient it gives.
        index: which operand of `one` is made of the gradient of the result.
        alike: for each axis of its other operand, the axis in `site` that it is.
    """
    number = SIDES.index(side)
    of_other, here = _axes(site, 1 - number), _axes(one, 1 - index)
    summed = {alike[axis] for axis in here.contracting}
    batch = {alike[axis] for axis in here.batch}
    return (
        summed <= {*of_other.remaining}
        and batch >= {*of_other.batch}
        and summed | batch == {*of_other.remaining, *of_other.batch}
        and _sizes_left(one, index) == _sizes_left(site, number)
    )


def _axes(site: Site, index: int) -> OperandAxes:
    shapes = (atom.aval.shape for atom in site.eqn.invars[:2])
    operation = DotGeneral.of(site.eqn.params["dimension_numbers"], *shapes)
    return operation.axes(SIDES[index])


def _sizes_left(site: Site, index: int) -> list[int]:
    shape = site.eqn.invars[index].aval.shape
    return sorted(shape[axis] for axis in _axes(site, index).remaining)


_SIDES_OF: Mapping[str, Callable[[Site, Site, int], Side | None]] = {
    "dot_general": _side_of_dot,
    "conv_general_dilated": convolutions_in_rules.side_of,
    "ragged_dot": ragged_dots_in_rules.side_of,
}
"""For each operation, the function from a contraction in a rule, one of the function,
and which operand of the former depends on a gradient, to what it is the gradient of."""

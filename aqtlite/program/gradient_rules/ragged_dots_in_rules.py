"""Gradients of `ragged_dot`s in users' rules: recognized, in the function's layout.

The arrays have the axes ``mk``, ``gkn`` and ``mn`` (`shapes.ragged_axes`). A rule may
have those of a matrix in the other order.
"""

from collections.abc import Sequence
from typing import Any

import jax

from aqtlite.jaxpr.sites import Site
from aqtlite.operations import SIDES, Side
from aqtlite.program.equation import why_not_quantized
from aqtlite.shapes.ragged_axes import RaggedAxes

_X, _W, _Y = "mk", "gkn", "mn"


def side_of(one: Site, site: Site, index: int) -> Side | None:
    """Returns the operand whose gradient a contraction in a rule gives, if any.

    Args:
        one: contraction in the rule.
        site: contraction of the function.
        index: which operand of `one` depends on the gradient of a result.
    """
    if why_not_quantized(site.eqn) is not None:
        return None
    other = 1 - index
    found = one.untransposed(other)
    for side, letters in zip(SIDES, (_W, _X), strict=True):
        kept = site.untransposed(1 - SIDES.index(side))
        if found is None or kept is None or found.identity != kept.identity:
            continue
        by_axis = dict(zip(kept.permutation, letters, strict=True))
        is_alike = [by_axis.get(axis) for axis in found.permutation]
        axes = _axes(one.eqn, side, index)
        if axes is not None and is_alike == list((axes.lhs, axes.rhs)[other]):
            return side
    return None


def operands(
    found: Any, index: int, side: Side, values: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of the result and the other operand, as the function has it.

    Args:
        found: equation of the gradient with respect to `side` in a rule.
        index: which operand of `found` is made of the gradient of the result.
        side: operand of the function.
        values: inputs of `found`.
    """
    axes = _axes(found, side, index)
    assert axes is not None  # It was recognized.
    of_both, wanted = (axes.lhs, axes.rhs), _W if side == "lhs" else _X
    other = 1 - index
    return (
        _laid_out(values[index], of_both[index], _Y),
        _laid_out(values[other], of_both[other], wanted),
    )


def result(found: Any, index: int, side: Side, out: jax.Array) -> jax.Array:
    """Returns the gradient of an operand as the rule has it.

    Args:
        found: equation in a rule.
        index: as in `operands`.
        side: operand of the function.
        out: its gradient, in its layout.
    """
    axes = _axes(found, side, index)
    assert axes is not None  # It was recognized.
    return _laid_out(out, _X if side == "lhs" else _W, axes.out)


def _laid_out(x: jax.Array, letters: str, wanted: str) -> jax.Array:
    return x.transpose([letters.index(letter) for letter in wanted])


def _axes(eqn: Any, side: Side, index: int) -> RaggedAxes | None:
    """Returns the axes of a contraction as the gradient of an operand.

    None if its groups are not those of one.

    Args:
        eqn: equation of a `ragged_dot_general`.
        side: operand whose gradient it would be.
        index: which of its operands is made of the gradient of the result.
    """
    ragged = eqn.params["ragged_dot_dimension_numbers"]
    contracting, batch = ragged.dot_dimension_numbers
    rows, groups = ragged.lhs_ragged_dimensions, ragged.rhs_group_dimensions
    is_single = [len(one) for one in (*contracting, *batch, rows)] == [1, 1, 0, 0, 1]
    if not is_single or eqn.params["group_offset"] is not None:
        return None
    lhs_axis, rhs_axis = (axes[0] for axes in contracting)
    row = rows[0]
    if side == "lhs":
        if index == 1 or len(groups) != 1 or row == lhs_axis:
            return None
        rhs = {rhs_axis: "n", groups[0]: "g"}
        of_rhs = "".join(rhs.get(axis, "k") for axis in range(3))
        return RaggedAxes("nm" if lhs_axis == 0 else "mn", of_rhs, "mk")
    if groups or row != lhs_axis:
        return None
    left, right = ("n", "k") if index == 0 else ("k", "n")
    return RaggedAxes(
        f"m{left}" if lhs_axis == 0 else f"{left}m",
        f"m{right}" if rhs_axis == 0 else f"{right}m",
        f"g{left}{right}",
    )

"""Gradients of convolutions in users' rules: recognized, and in the function's layout.

JAX's own transposition defines the form of a gradient: that of the input convolves the
gradient of the result with the reversed kernel, that of the kernel convolves the input
with the gradient of the result. A rule may have it with the axes of its arrays in
another order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from aqtlite.jaxpr import sites
from aqtlite.jaxpr.axes import axis_facts
from aqtlite.jaxpr.origins import Origin
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import SIDES, Side
from aqtlite.shapes import block_shapes
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import shape_of

_GRADIENT = frozenset({-1})
"""The origin of the gradient of a result, which is no input of the function."""


def side_of(one: Site, site: Site, index: int) -> Side | None:
    """Returns the operand whose gradient a contraction in a rule gives, if any.

    Args:
        one: convolution in the rule.
        site: convolution of the function.
        index: which operand of `one` depends on the gradient of a result.
    """
    # JAX has the gradient of the result as the input of one, and as the kernel of the
    # other one.
    side = SIDES[index]
    other = 1 - index
    wanted = _by_jax(site, side)
    found_value, wanted_value = (x.untransposed(other) for x in (one, wanted))
    if found_value is None or wanted_value is None:
        return None
    is_alike = (
        _steps(one.eqn) == _steps(wanted.eqn)
        and found_value.identity == wanted_value.identity
        and [found_value.permutation[axis] for axis in _specs(one.eqn)[other]]
        == [wanted_value.permutation[axis] for axis in _specs(wanted.eqn)[other]]
        and _sizes(one.eqn, index) == _sizes(wanted.eqn, index)
    )
    return side if is_alike else None


def operands(
    found: Any, eqn: Any, side: Side, values: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of the result and the other operand, as the function has it.

    Args:
        found: equation of the gradient with respect to `side` in a rule.
        eqn: equation of the function.
        side: operand of `eqn`.
        values: inputs of `found`.
    """
    x, w, y = _specs(eqn)
    first, second, _ = _specs(found)
    if side == "rhs":
        g, given = _laid_out(values[1], _exchanged(second), y), values[0]
        return g, _laid_out(given, _exchanged(first), x)
    steps = _steps(eqn)
    groups = max(steps.feature_group_count, steps.batch_group_count)
    kernel = lax.rev(_laid_out(values[1], _exchanged(second), w), w[2:])
    kernel = block_shapes.move_groups(kernel, w[1], w[0], groups)
    return _laid_out(values[0], first, y), kernel


def result(found: Any, eqn: Any, side: Side, out: jax.Array) -> jax.Array:
    """Returns the gradient of an operand as the rule has it.

    Args:
        found: equation in a rule.
        eqn: equation of the function.
        side: operand of `eqn`.
        out: its gradient, in its layout.
    """
    x, w, _ = _specs(eqn)
    *_, spec = _specs(found)
    if side == "rhs":
        return _laid_out(out, w, _exchanged(spec))
    # JAX has groups of examples in front of the features, and moves them afterwards.
    out = block_shapes.move_groups(out, x[0], x[1], eqn.params["batch_group_count"])
    return _laid_out(out, x, spec)


class _Steps(NamedTuple):
    """What a convolution does besides the order of its axes."""

    window_strides: Any
    padding: Any
    lhs_dilation: Any
    rhs_dilation: Any
    feature_group_count: int
    batch_group_count: int


def _steps(eqn: Any) -> _Steps:
    return _Steps(*(eqn.params[name] for name in _Steps._fields))


def _specs(eqn: Any) -> tuple[Axes, Axes, Axes]:
    """The axes of lhs, rhs and result: the first two of each, then the spatial axes."""
    specs = eqn.params["dimension_numbers"]
    return specs.lhs_spec, specs.rhs_spec, specs.out_spec


def _exchanged(spec: Axes) -> Axes:
    """The axes of an array with the first two exchanged."""
    return spec[1], spec[0], *spec[2:]


def _sizes(eqn: Any, index: int) -> list[int]:
    shape = eqn.invars[index].aval.shape
    return [shape[axis] for axis in _specs(eqn)[index]]


def _laid_out(x: jax.Array, spec: Sequence[int], wanted: Sequence[int]) -> jax.Array:
    """Returns an array whose axes `spec` are moved to be its axes `wanted`."""
    by_wanted = dict(zip(wanted, spec, strict=True))
    return x.transpose([by_wanted[axis] for axis in range(x.ndim)])


def _by_jax(site: Site, side: Side) -> Site:
    """Returns JAX's own gradient of a convolution.

    Args:
        site: the convolution.
        side: the operand whose gradient it is.
    """
    eqn, number = site.eqn, SIDES.index(side)
    avals = [shape_of(atom.aval) for atom in (*eqn.invars, *eqn.outvars)]

    def gradient(other: jax.Array, g: jax.Array) -> Any:
        def contract(x: jax.Array) -> jax.Array:
            both = (x, other) if side == "lhs" else (other, x)
            return eqn.primitive.bind(*both, **eqn.params)

        return jax.linear_transpose(contract, avals[number])(g)

    closed = jax.make_jaxpr(gradient)(avals[1 - number], avals[2])
    unknown = axis_facts.unknown(len(avals[2].shape))
    inputs = [site.operands[1 - number], Origin(_GRADIENT, facts=unknown)]
    place = sites.Place(frozenset(), frozenset({eqn.primitive.name}))
    found = sites.Found([], [])
    sites.walk(closed, inputs, place, found)
    (made,) = found.contractions
    return made

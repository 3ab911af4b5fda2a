"""Gradients by a user's rule: the contractions in it as a config's `dlhs` and `drhs`.

A function with `jax.custom_vjp` or `jax.custom_jvp` keeps its rule. What the rule
contracts is quantized where it is recognized (`jaxpr.recognized`): the gradient of a
contraction of the function, or that contraction once more. Its own formula stays: no
estimator is applied, and the other operand is quantized anew, since the rule decides
what it saves.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aqtlite import calibration, config, errors
from aqtlite.config import arithmetic
from aqtlite.contraction import differentiation, execution
from aqtlite.jaxpr.replacement import Location, Replacement
from aqtlite.operations import SIDES, DotGeneral, Operation, RaggedDot
from aqtlite.program.gradient_rules import convolutions_in_rules, ragged_dots_in_rules
from aqtlite.program.gradient_rules.recognized import Gradient
from aqtlite.program.planned import PlannedContraction


def config_of(cfg: config.DotGeneral, name: str) -> config.DotGeneralRaw:
    """Returns the config of one gradient in a rule, which keeps no integers.

    An operand that the gradient takes from the forward contraction is quantized anew on
    the same grid; beside a gradient in float it stays in float.

    Args:
        cfg: config of the contraction.
        name: "dlhs" or "drhs".
    """
    raw: config.DotGeneralRaw = getattr(cfg, name)
    if not raw.rhs.use_fwd_quant:
        return raw
    forward: config.Tensor = getattr(cfg.fwd, arithmetic.FORWARD_SIDE[name])
    rhs = dataclasses.replace(raw.rhs, use_fwd_quant=False)
    if not raw.lhs.is_quantized:
        rhs = config.Tensor()
    elif not rhs.is_quantized:
        grid = forward.to_nearest().grid
        has_zero_point = grid.zero_point_range is not None
        of_array = calibration.MinMax() if has_zero_point else calibration.AbsMax()
        rhs = config.Tensor(numerics=grid, calibration=of_array)
    return dataclasses.replace(raw, rhs=rhs)


def name_of(one: PlannedContraction, gradient: Gradient) -> str:
    """Returns the name of a recognized gradient in the config of a contraction."""
    number = SIDES.index(gradient.side)
    return f"d{SIDES[number != one.is_exchanged]}"


def replacements(
    one: PlannedContraction, made: Replacement
) -> dict[Location, Replacement]:
    """Returns the replacements of what rules have of a contraction.

    Args:
        one: the contraction, which is quantized.
        made: its replacement in the function.
    """
    once_more = dataclasses.replace(made, has_aux=False)
    found = {again.site.location: once_more for again in one.again}
    for gradient in one.gradients:
        name = name_of(one, gradient)
        raw = config_of(one.cfg, name)
        if raw.lhs.is_quantized or raw.rhs.is_quantized:
            _check_axes(one, name, raw)
            found[gradient.site.location] = Replacement(
                functools.partial(_contract, one, gradient, raw),
                per_step=(False,) * len(one.site.per_step),
            )
    return found


def _contract(
    one: PlannedContraction,
    found: Gradient,
    raw: config.DotGeneralRaw,
    values: Sequence[Any],
    given: None,
) -> tuple[list[jax.Array], None]:
    """Contracts a recognized gradient, quantized.

    Args:
        one: the contraction whose gradient it is.
        found: the gradient.
        raw: its config.
        values: inputs of its equation.
        given: nothing.
    """
    del given
    name, eqn = name_of(one, found), found.site.eqn
    dtype = eqn.outvars[0].aval.dtype
    forward, *avals = one.types()
    lhs, rhs = (jnp.zeros(aval.shape, dtype) for aval in avals)
    cfg = config.DotGeneral(dlhs=raw) if name == "dlhs" else config.DotGeneral(drhs=raw)
    is_float = not (raw.lhs.is_quantized and raw.rhs.is_quantized)
    takes_precision = forward.takes_precision and is_float
    precision = eqn.params["precision"] if takes_precision else None
    how = execution.resolve(cfg, forward, lhs, rhs, dtype, precision=precision)
    gradient = how.gradient(SIDES[name == "drhs"])
    there = _IN_ORDER[one.op](one, found, values)
    out, _ = differentiation.contract_gradient(
        gradient, there.operation, there.g, there.other, None, (), None
    )
    return [there.as_in_rule(out)], None


class _InOrder(NamedTuple):
    """A contraction in a rule, as that of a gradient."""

    operation: Operation
    """The contraction of the gradient of a result, first, with the other operand."""

    g: jax.Array
    """The gradient of the result."""

    other: jax.Array
    as_in_rule: Callable[[jax.Array], jax.Array]
    """From the result of the operation to that of the equation in the rule."""


def _dot(one: PlannedContraction, found: Gradient, values: Sequence[Any]) -> _InOrder:
    del one
    operation, order = _operation(found)
    g, other = values[found.index], values[1 - found.index]
    return _InOrder(operation, g, other, lambda out: out.transpose(order))


def _convolution(
    one: PlannedContraction, found: Gradient, values: Sequence[Any]
) -> _InOrder:
    eqns = found.site.eqn, one.site.eqn
    g, other = convolutions_in_rules.operands(*eqns, found.side, values)
    forward, *_ = one.types()
    order = one.order(len(one.lhs.shape))
    if order is not None:  # It runs as the product of matrices.
        g = g.reshape(*g.shape, *[1] * (len(order) - g.ndim))
        g = g.transpose(sorted(range(len(order)), key=order.__getitem__))
    result = functools.partial(convolutions_in_rules.result, *eqns, found.side)
    return _InOrder(forward.gradient(found.side), g, other, result)


def _ragged_dot(
    one: PlannedContraction, found: Gradient, values: Sequence[Any]
) -> _InOrder:
    form = found.site.eqn, found.index, found.side
    g, other = ragged_dots_in_rules.operands(*form, values)
    # The sizes of groups are those of the rule.
    forward = RaggedDot(values[2], g.shape[0])
    g = forward.masked(g)
    if found.side == "rhs":
        other = forward.masked(other)
    result = functools.partial(ragged_dots_in_rules.result, *form)
    return _InOrder(forward.gradient(found.side), g, other, result)


_IN_ORDER = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
}


def _operation(found: Gradient) -> tuple[DotGeneral, tuple[int, ...]]:
    """Returns the contraction of the gradient first, and the order of its result."""
    eqn = found.site.eqn
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    dims = eqn.params["dimension_numbers"]
    ndim = len(eqn.outvars[0].aval.shape)
    if found.index == 0:
        return DotGeneral.of(dims, lhs, rhs), tuple(range(ndim))
    exchanged = tuple((second, first) for first, second in dims)
    (_, rhs_ca), (batch, _) = dims
    start, end = len(batch), len(rhs) - len(rhs_ca)
    order = (*range(start), *range(end, ndim), *range(start, end))
    return DotGeneral.of(exchanged, rhs, lhs), order


def _check_axes(one: PlannedContraction, name: str, raw: config.DotGeneralRaw) -> None:
    """Raises ValueError for axes by number, which rules have in another order."""
    for side in SIDES:
        tensor: config.Tensor = getattr(raw, side)
        for field in ("calib_shared_axes", "noise_shared_axes"):
            axes = getattr(tensor, field)
            if isinstance(axes, tuple):
                raise ValueError(
                    f"the contraction {errors.quoted(one.path)} has "
                    f"{name}.{side}.{field}={axes}, and its gradient is that of a "
                    f"{one.rule_of_gradient}, which has its axes in an order of its "
                    "own: leave it None"
                )

"""The quantized contraction with its custom gradients, for every operation.

Before: `lowering/kinds.py`, sums of products.
Next: `flax/linen/dot_general.py`, the call of a layer.

Quantization and the integer contraction stay outside of any `custom_vjp`, so that
checkpoint policies see them. `_straight_through`, a `custom_vjp`, then scales the sums
and differentiates as if nothing had been rounded (straight-through estimator): a
gradient quantizes the output's gradient and the other operand, contracts them, and
passes where `straight_through` says that nothing was clipped. Float operands are saved
for the backward pass only where it quantizes them anew. Both gradients call the same
function, with float gradients of its own, so that second derivatives exist.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from aqtlite.contraction import (
    accumulation,
    cost_warnings,
    execution,
    quantized_sums,
    remat,
    scale_moves,
    straight_through,
    tapped,
)
from aqtlite.contraction.execution import ContractionExecution, Execution
from aqtlite.contraction.residuals import (
    Residuals,
    absent,
    is_absent,
    scales_on_output,
)
from aqtlite.jaxpr import inlined
from aqtlite.lowering import exact, fusion
from aqtlite.operations import SIDES, Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization.preparation import padding, preparation
from aqtlite.quantization.seeds import Seeds
from aqtlite.quantization.states import gradient_statistics, state_checks
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import (
    explicit_sharding,
    is_manual,
    sharded_like,
    vary_together,
)

_NO_STATES = States()

SCOPE = "aqtlite"
"""The name scope of a quantized contraction, from which rules recognize one."""


@jax.named_scope(SCOPE)
def quantize_and_contract(
    how: Execution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...] = (),
    states: States = _NO_STATES,
) -> jax.Array:
    """Quantizes the operands that the config quantizes, contracts, and scales the sums.

    Args:
        how: execution of the contraction and of its gradients.
        operation: the contraction.
        lhs: float array, or a `QTensor` in place of an array to quantize.
        rhs: like `lhs`.
        seed: seed of the noise, uint32 of shape ``(2,)``; None seeds from the operands.
        forward_scales: scales of the forward pass, in a shape that broadcasts with lhs;
            they give equal gradients of different contractions different noise.
        states: states of calibrations with statistics or learned parameters.

    Returns:
        The result, in ``how.fwd.out_dtype``.
    """
    in_shard_map = is_manual()
    if in_shard_map:
        operation, lhs, rhs, states = vary_together((operation, lhs, rhs, states))
    if how.fwd.has_element_scales:
        moved = _moved_once if inlined.are_tracers((lhs, rhs)) else _moved
        lhs, rhs = moved(how, operation, lhs, rhs, seed, states)
    fixed_lhs, fixed_rhs = map(_constant, (lhs, rhs))
    fixed = jax.lax.stop_gradient(states)
    lhs, rhs = (
        # The array that takes the gradient; a `QTensor` without one stays.
        x.unrounded if isinstance(x, QTensor) and x.unrounded is not None else x
        for x in (lhs, rhs)
    )
    forward_scales = jax.lax.stop_gradient(forward_scales)
    quantize_and_sum = quantized_sums.function_for(how.fwd, fixed_lhs, fixed_rhs, fixed)
    (lhs_q, lhs_nan), (rhs_q, rhs_nan), sums = quantize_and_sum(
        how.fwd, operation, fixed_lhs, fixed_rhs, seed, forward_scales, fixed
    )
    # `jax.shard_map` without jit does not take a `custom_vjp` with symbolic zeros.
    finish = _jitted_straight_through if in_shard_map else _straight_through
    out = finish(how, operation, sums, lhs, rhs, lhs_q, rhs_q, seed, states)
    for side, factor in zip(SIDES, (lhs_nan, rhs_nan), strict=True):
        if factor is not None:
            factor = operation.scale_to_output(side, factor)
            factor = sharded_like(factor, explicit_sharding(out))
            out = out * factor.astype(out.dtype)
    return out


def _moved(
    how: Execution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    seed: jax.Array | None,
    states: States,
) -> tuple[Operand, Operand]:
    """The operands, after the scale of one of them has multiplied the other."""
    lhs = _quantized_first(how, operation, "lhs", (lhs, rhs), seed, states.lhs)
    rhs = _quantized_first(how, operation, "rhs", (rhs, lhs), seed, states.rhs)
    if how.fwd.lhs.scale_moves and isinstance(lhs, QTensor):
        lhs, rhs = scale_moves.move(operation, "lhs", lhs, rhs)
    elif how.fwd.rhs.scale_moves and isinstance(rhs, QTensor):
        rhs, lhs = scale_moves.move(operation, "rhs", rhs, lhs)
    return lhs, rhs


# Attentions of one shape share one trace.
_moved_once = inlined.traced_once(_moved, static_argnums=0)


def _quantized_first(
    how: Execution,
    operation: Operation,
    side: Side,
    operands: tuple[Operand, Operand],
    seed: jax.Array | None,
    state: Any,
) -> Operand:
    x, other = operands
    one = how.fwd.lhs if side == "lhs" else how.fwd.rhs
    if not one.tensor.scale_moves or isinstance(x, QTensor):
        return x
    seeds = Seeds(seed, (), one.salt)
    axes = operation.axes(side)
    q = straight_through.quantized(x, one.tensor, axes, one.path, seeds, state)
    if tapped.is_tapping():
        shapes = x.shape, other.shape
        ordered = shapes if side == "lhs" else shapes[::-1]
        q = tapped.noted_operand(q, x, how.fwd, operation, side, ordered, seeds, state)
    return remat.named(side, q)


def _constant(x: Operand) -> Operand:
    plain = x.stop_gradient() if isinstance(x, QTensor) else x
    fixed: Operand = jax.lax.stop_gradient(plain)
    return fixed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(
    how: Execution,
    operation: Operation,
    sums: jax.Array,
    lhs: Operand,
    rhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
    seed: jax.Array | None,
    states: States,
) -> jax.Array:
    """The sums times the scales, as a function of the float operands."""
    del lhs, rhs, seed, states  # For the backward pass.
    out = accumulation.scaled(how.fwd, operation, sums, lhs_q, rhs_q)
    if how.fwd.out_dtype == jnp.bfloat16:
        # XLA skips this rounding in some programs and not in others.
        out = exact.rounded(out, how.fwd.out_dtype)
    out = out.astype(how.fwd.out_dtype)
    # Fused with a sum, a product is not rounded before it is added.
    return fusion.barrier(out) if how.fwd.is_product else out


def _straight_through_fwd(how: Execution, *primals: Any):
    differentiated = _differentiated(how, primals)
    operation, sums, lhs, rhs, lhs_q, rhs_q, seed, states = jax.tree.map(
        lambda primal: primal.value, primals, is_leaf=_is_primal
    )
    _check_not_frozen(how, differentiated, (lhs, rhs))
    _check_second_derivative(how, differentiated)
    _warn_of_costs(how, differentiated)
    inner = dataclasses.replace(how, differentiated=differentiated)
    out = _straight_through(
        inner, operation, sums, lhs, rhs, lhs_q, rhs_q, seed, states
    )
    saved_lhs = lhs if lhs_q is None or how.saves("lhs") == "float" else lhs_q
    saved_rhs = rhs if rhs_q is None or how.saves("rhs") == "float" else rhs_q
    estimators = [
        None if isinstance(x, QTensor) else straight_through.estimator(one, x, q, state)
        for one, x, q, state in (
            (how.fwd.lhs, lhs, lhs_q, states.lhs),
            (how.fwd.rhs, rhs, rhs_q, states.rhs),
        )
    ]
    saved_lhs, saved_rhs, estimators = remat.packed((saved_lhs, saved_rhs, estimators))
    of_lhs, of_rhs = estimators
    if "lhs" not in differentiated:
        saved_rhs, of_lhs = absent(saved_rhs), absent(of_lhs)
    if "rhs" not in differentiated:
        saved_lhs, of_rhs = absent(saved_lhs), absent(of_rhs)
    scaled: list[QTensor | None] = [None, None]
    if seed is None and any(how.gradient(side).needs_noise for side in SIDES):
        scaled = [lhs_q, rhs_q]
    scales = [None if q is None else q.scale for q in scaled]
    return out, Residuals(
        operation=operation,
        lhs=saved_lhs,
        rhs=saved_rhs,
        estimators=(of_lhs, of_rhs),
        seed=seed,
        scales=(scales[0], scales[1]),
        states=States(dlhs=states.dlhs, drhs=states.drhs),
        scaled_shapes=tuple(() if q is None else q.qvalue.shape for q in scaled),
    )


def _differentiated(how: Execution, primals: Sequence[Any]) -> tuple[Side, ...]:
    """The operands that a gradient is asked of, or whose learned range it is."""
    _, _, lhs, rhs, _, _, _, states = primals
    tensors = how.fwd.lhs.tensor, how.fwd.rhs.tensor
    each = zip(SIDES, (lhs, rhs), tensors, states[:2], strict=True)
    return tuple(
        side
        for side, x, tensor, state in each
        if _is_perturbed(x)
        # The parameters of a frozen operand are no longer used.
        or (tensor.is_learned and not isinstance(x, QTensor) and _is_perturbed(state))
    )


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _is_perturbed(operand: Any) -> bool:
    return any(p.perturbed for p in jax.tree.leaves(operand, is_leaf=_is_primal))


def _check_not_frozen(
    how: Execution, differentiated: tuple[Side, ...], operands: Sequence[Operand]
) -> None:
    """Raises TypeError for a gradient with respect to a `QTensor`."""
    for side, x in zip(SIDES, operands, strict=True):
        if isinstance(x, QTensor) and side in differentiated:
            raise TypeError(
                f"a gradient was asked with respect to {how.fwd.path}.{side}, a "
                f"QTensor of shape {x.shape}: frozen integers are for serving and have "
                "no gradient. Train on the float variables and convert them again"
            )


def _warn_of_costs(how: Execution, differentiated: tuple[Side, ...]) -> None:
    """Warns of calibrations that take long in every step of training."""
    for one in (how.fwd, *map(how.gradient, differentiated)):
        for operand in (one.lhs, one.rhs):
            cost = operand.tensor.calibration.cost_in_training
            is_found = operand.tensor.is_quantized and not operand.is_given
            if cost is not None and is_found and operand.reuse is None:
                cost_warnings.warn(operand, cost)


def _check_second_derivative(how: Execution, differentiated: tuple[Side, ...]) -> None:
    """Raises ValueError for a derivative of saved integers by their float operand."""
    for gradient, other in zip(SIDES, reversed(SIDES), strict=True):
        is_mixed = gradient in how.differentiated and other in differentiated
        if is_mixed and how.saves(other) == "quantized":
            raise ValueError(
                f"a second derivative was asked for of the gradient of {gradient} "
                f"with respect to {other}, but d{gradient}.rhs.use_fwd_quant=True "
                f"saves only the integers of {other}, which have none. Set it to "
                f'False: config.update(cfg, {{"d{gradient}.rhs.use_fwd_quant": False}})'
                ". First-order methods, which stop the gradient of a gradient, need "
                "none: stop that of the parameters that it is taken at"
            )


def _straight_through_bwd(how: Execution, saved: Residuals, g: Any):
    gradients: dict[str, Any] = {"lhs": None, "rhs": None}
    states: dict[str, Any] = saved.states._asdict() | {"lhs": None, "rhs": None}
    if not isinstance(g, jax.custom_derivatives.SymbolicZero):
        scales = scales_on_output(saved)
        others = saved.rhs, saved.lhs
        # Layers of one shape share one trace of the gradient.
        gradient_of = _traced_once if inlined.are_tracers(g) else contract_gradient
        for side, other, own in zip(SIDES, others, saved.estimators, strict=True):
            if own is not None and not is_absent((other, own)):
                out, states[f"d{side}"] = gradient_of(
                    how.gradient(side),
                    saved.operation.gradient(side),
                    g,
                    remat.unpacked(other),
                    saved.seed,
                    scales,
                    states[f"d{side}"],
                )
                gradients[side], states[side] = remat.unpacked(own).gradients(out)
    lhs, rhs = gradients["lhs"], gradients["rhs"]
    return None, None, lhs, rhs, None, None, None, States(**states)


_straight_through.defvjp(
    _straight_through_fwd, _straight_through_bwd, symbolic_zeros=True
)


_jitted_straight_through = jax.jit(_straight_through, static_argnums=0, inline=True)


def contract_gradient(
    how: ContractionExecution,
    operation: Operation,
    g: jax.Array,
    other: Operand,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...],
    state: Any,
) -> tuple[jax.Array, Any]:
    """Contracts the gradient of the output with the residual of the other operand.

    Args:
        how: ``execution.gradient(side)`` of the side whose gradient it gives.
        operation: ``operation.gradient(side)``.
        g: gradient of the output.
        other: the other operand.
        seed: seed of the noise; None seeds from `g`.
        forward_scales: as for `quantize_and_contract`.
        state: statistics of `g`, if its calibration gathers any.

    Returns:
        The gradient of an operand, and the updated statistics of the gradient of the
        output.
    """
    layout = explicit_sharding(g)
    forward_scales = tuple(sharded_like(one, layout) for one in forward_scales)
    if isinstance(other, QTensor):
        # The sums are over the axes that the forward pass contracted.
        other = dataclasses.replace(other, sums=None)
        if how.rhs.reuse == "stored":
            scale = block_shapes.repeat(other.scale, other.shape, range(other.ndim))
            moved = sharded_like(operation.rhs_scale_to_lhs(scale), layout)
            g = jax.lax.mul(exact.float32(g), moved).astype(exact.wide_dtype(g.dtype))
            unit = jnp.ones((1,) * other.ndim, jnp.float32)
            other = dataclasses.replace(other, scale=unit)
        elif how.rhs.reuse == "dequantized":
            other = other.dequant()
    shape = operation.output_shape(g.shape, other.shape)
    tensors = how.lhs.tensor, how.rhs.tensor
    if how.rotation is not None or any(one.blocks is not None for one in tensors):
        prepared, other = preparation.prepare_gradient(
            how.rotation, operation, g, other, tensors, how.path
        )
        g = cast(jax.Array, prepared)
    inner = execution.resolve_gradient(how, operation, g, other)
    states = _NO_STATES
    tensor = how.lhs.tensor
    if tensor.gathers_statistics:
        state_checks.check_given(tensor, state, how.lhs.path)
        state = gradient_statistics.update(tensor, state, g, how.lhs.path)
        states = States(lhs=gradient_statistics.typed(tensor, state, g.ndim))
        # Two batches may have equal bounds, and still need different noise.
        count = jnp.reshape(state.batches, (1,) * g.ndim)
        forward_scales = (*forward_scales, count)
    out = quantize_and_contract(
        inner, operation, g, other, seed, forward_scales, states
    )
    return out if out.shape == shape else padding.crop(out, shape), state


_traced_once = inlined.traced_once(contract_gradient, static_argnums=0)

"""The quantized contraction with its custom gradients, for every operation.

The operands are quantized and their integers contracted in plain sight: checkpoint
policies see a contraction of integers. Around it stands `_straight_through`, a
`custom_vjp` that scales the sums and differentiates as if nothing had been rounded
(straight-through estimator). Float operands are saved for the backward pass only where
it quantizes them afresh. Both gradients are calls of the same function, whose own
gradients are float, so that second derivatives exist.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import execution, operands, products, quantizer, tiles
from aqtlite.dimension_numbers import Axes
from aqtlite.execution import ContractionExecution, Execution, OperandExecution
from aqtlite.lowering import exact
from aqtlite.operations import SIDES, Operation, Side
from aqtlite.qtensor import Operand, QTensor
from aqtlite.sharding import is_manual, vary_together
from aqtlite.statistics import States


def quantize_and_contract(
    how: Execution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...] = (),
    states: States = ((), ()),
) -> jax.Array:
    """Quantizes what is to be quantized, contracts, and scales the sums.

    Args:
        how: what runs in what.
        operation: the contraction.
        lhs: float array, or a `QTensor` in place of one that is quantized.
        rhs: the same.
        seed: of the noise, uint32 of shape ``(2,)``; None seeds from the operands.
        forward_scales: the scales of the forward pass, laid out so that they would
            multiply lhs; with them, gradients that are equal have other noise.
        states: the statistics of calibrations that gather them.

    Returns:
        The result, in ``how.fwd.out_dtype``.
    """
    lhs, rhs = vary_together((lhs, rhs))
    fixed_lhs, fixed_rhs = jax.lax.stop_gradient((lhs, rhs))
    forward_scales = jax.lax.stop_gradient(forward_scales)
    lhs_seeds = operands.Seeds(seed, forward_scales, how.fwd.lhs.salt)
    rhs_seeds = operands.Seeds(seed, (), how.fwd.rhs.salt)
    lhs_axes, rhs_axes = (operation.axes(side).contracting for side in SIDES)
    lhs_q = _quantize(how.fwd, how.fwd.lhs, fixed_lhs, lhs_axes, lhs_seeds, states[0])
    rhs_q = _quantize(how.fwd, how.fwd.rhs, fixed_rhs, rhs_axes, rhs_seeds, states[1])
    sums = products.sum_products(how.fwd, operation, fixed_lhs, fixed_rhs, lhs_q, rhs_q)
    # `jax.shard_map` without jit does not take a `custom_vjp` with symbolic zeros.
    finish = _jitted_straight_through if is_manual() else _straight_through
    return finish(how, operation, sums, lhs, rhs, lhs_q, rhs_q, seed)


def _quantize(
    how: ContractionExecution,
    one: OperandExecution,
    x: Operand,
    contracting: Axes,
    seeds: operands.Seeds,
    state: Any,
) -> QTensor | None:
    q = operands.quantize(
        x, one.tensor, contracting, one.path, seeds, state, one.local_tiles
    )
    if q is None or q is x or how.path != "fwd":
        return q
    # What may be frozen is compiled alike whether it is computed or given.
    return operands.with_fusion_barrier(q)


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
) -> jax.Array:
    """The sums times the scales, as a function of the float operands."""
    del lhs, rhs, seed  # For the backward pass.
    if not products.is_tiled(how.fwd, operation, lhs_q, rhs_q):
        sums = products.scaled(how.fwd, operation, sums, lhs_q, rhs_q)
    return sums.astype(how.fwd.out_dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """The residuals of the forward pass."""

    operation: Operation
    lhs: Operand | None
    """Needed by the gradient of rhs; None if that is not asked for."""

    rhs: Operand | None
    lhs_mask: jax.Array | None
    """The elements at which the gradient of lhs passes; None for all."""

    rhs_mask: jax.Array | None
    seed: jax.Array | None
    scales: tuple[jax.Array | None, jax.Array | None]
    """The scales of lhs and rhs; they tell the noise of equal gradients apart."""


def _straight_through_fwd(how: Execution, *primals: Any):
    _, _, lhs, rhs, _, _, _ = primals
    perturbed = _is_perturbed(lhs), _is_perturbed(rhs)
    differentiated = tuple(itertools.compress(SIDES, perturbed))
    operation, sums, lhs, rhs, lhs_q, rhs_q, seed = jax.tree.map(
        lambda primal: primal.value, primals, is_leaf=_is_primal
    )
    for side, x in (("lhs", lhs), ("rhs", rhs)):
        if isinstance(x, QTensor) and side in differentiated:
            raise TypeError(
                f"a gradient was asked with respect to {how.fwd.path}.{side}, a "
                f"QTensor of shape {x.shape}: frozen integers are for serving and have "
                "no gradient. Train on the float variables and convert them again"
            )
    _check_second_derivative(how, differentiated)
    inner = dataclasses.replace(how, differentiated=differentiated)
    out = _straight_through(inner, operation, sums, lhs, rhs, lhs_q, rhs_q, seed)
    saved: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "lhs_mask", "rhs_mask"))
    if "lhs" in differentiated:
        saved["rhs"] = rhs_q if how.saves_rhs == "quantized" else rhs
        saved["lhs_mask"] = _gradient_mask(lhs, lhs_q)
    if "rhs" in differentiated:
        saved["lhs"] = lhs_q if how.saves_lhs == "quantized" else lhs
        saved["rhs_mask"] = _gradient_mask(rhs, rhs_q)
    scales: tuple[jax.Array | None, jax.Array | None] = None, None
    if seed is None and (how.dlhs.needs_noise or how.drhs.needs_noise):
        scales = _scale_of(lhs_q), _scale_of(rhs_q)
    return out, _Residuals(operation=operation, **saved, seed=seed, scales=scales)


def _scale_of(q: QTensor | None) -> jax.Array | None:
    return None if q is None else q.scale


def _scales_on_output(
    operation: Operation, scales: tuple[jax.Array | None, jax.Array | None]
) -> tuple[jax.Array, ...]:
    """The scales that can multiply the output, laid out so."""
    return tuple(
        operation.scale_to_output(side, scale)
        for side, scale in zip(SIDES, scales, strict=True)
        if scale is not None
        and all(scale.shape[axis] == 1 for axis in operation.axes(side).contracting)
    )


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _is_perturbed(operand: Any) -> bool:
    return any(p.perturbed for p in jax.tree.leaves(operand, is_leaf=_is_primal))


def _check_second_derivative(how: Execution, differentiated: tuple[Side, ...]) -> None:
    """Refuses a derivative of saved integers with respect to what they came from."""
    for gradient, other in zip(SIDES, reversed(SIDES), strict=True):
        is_mixed = gradient in how.differentiated and other in differentiated
        if is_mixed and how.saves(other) == "quantized":
            raise ValueError(
                f"a second derivative was asked for of the gradient of {gradient} "
                f"with respect to {other}, but d{gradient}.rhs.use_fwd_quant=True "
                f"saves only the integers of {other}, which have none. Set it to "
                "False, for instance with config.fully_quantized(use_fwd_quant=False)"
            )


def _gradient_mask(x: Operand, q: QTensor | None) -> jax.Array | None:
    if q is None or q.numerics is None or isinstance(x, QTensor):
        return None
    scaled = quantizer.scaled(x, q.scale, q.numerics)
    if q.zero_point is None:
        mask = q.numerics.gradient_mask(scaled)
    else:
        mask = q.numerics.gradient_mask_around(scaled, q.zero_point)
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape != x.shape):
        raise TypeError(
            f"{type(q.numerics).__name__}.gradient_mask must return a bool array of "
            f"shape {x.shape}, got {mask.dtype} of shape {mask.shape}"
        )
    return mask


def _straight_through_bwd(how: Execution, saved: _Residuals, g: Any):
    gradients: dict[str, Any] = {"lhs": None, "rhs": None}
    if not isinstance(g, jax.custom_derivatives.SymbolicZero):
        scales = _scales_on_output(saved.operation, saved.scales)
        others = saved.rhs, saved.lhs
        masks = saved.lhs_mask, saved.rhs_mask
        for side, other, mask in zip(SIDES, others, masks, strict=True):
            if other is not None:
                out = _gradient(
                    how.gradient(side),
                    saved.operation.gradient(side),
                    g,
                    other,
                    saved.seed,
                    scales,
                )
                gradients[side] = out if mask is None else jnp.where(mask, out, 0)
    return None, None, gradients["lhs"], gradients["rhs"], None, None, None


_straight_through.defvjp(
    _straight_through_fwd, _straight_through_bwd, symbolic_zeros=True
)


_jitted_straight_through = jax.jit(_straight_through, static_argnums=0, inline=True)


def _gradient(
    how: ContractionExecution,
    operation: Operation,
    g: jax.Array,
    other: Operand,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...],
) -> jax.Array:
    """Contracts the gradient of the output with what the forward pass left."""
    if isinstance(other, QTensor):
        if how.rhs.reuse == "stored":
            scale = tiles.repeat(other.scale, other.shape, range(other.ndim))
            moved = operation.rhs_scale_to_lhs(scale)
            g = (exact.float32(g) * moved).astype(operands.wide_dtype(g.dtype))
            unit = jnp.ones((1,) * other.ndim, jnp.float32)
            other = dataclasses.replace(other, scale=unit)
        elif how.rhs.reuse == "dequantized":
            other = other.dequant()
    inner = execution.resolve_gradient(how, operation, g, other)
    return quantize_and_contract(inner, operation, g, other, seed, forward_scales)

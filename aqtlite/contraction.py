"""One contraction with its custom gradient, the forward or a backward one.

The operands are quantized and their integers contracted in plain sight: what JAX sees
is a `dot_general` of integers, which checkpoint policies know. Around it stands
`_straight_through`, a `custom_vjp` that turns the sums into the result and says that
its gradient is that of the float operands (straight-through estimator). They are saved
for the backward pass only where it quantizes them afresh. The two backward contractions
are calls of the same function, with a float backward of their own, so that second
derivatives exist.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config, lowering, operands, quantizer, tiles
from aqtlite import dimension_numbers as dn
from aqtlite.lowering import exact
from aqtlite.qtensor import QTensor
from aqtlite.sharding import explicit_sharding, is_manual, sharded_like, vary_together

_FLOAT = config.DotGeneralRaw()


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about one contraction."""

    fwd: config.DotGeneralRaw
    dlhs: config.DotGeneralRaw
    drhs: config.DotGeneralRaw
    path: str  # where `fwd` stands in the user's config
    dims: dn.DimensionNumbers
    out_dtype: np.dtype
    # How the result's axes are permuted, from the order of `lax.dot_general`.
    order: dn.Axes | None = None
    out_sharding: Any = None  # of the permuted result
    # With respect to which operands the enclosing differentiation, if there is one,
    # differentiates.
    lhs_is_differentiated: bool = False
    rhs_is_differentiated: bool = False
    salt: int = 0  # tells the noise of this contraction from that of its sibling


def quantize_and_contract(
    call: Call,
    lhs: operands.Operand,
    rhs: operands.Operand,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Quantizes what the config quantizes, contracts, and scales the sums.

    Args:
        call: what is static.
        lhs: float array, or a `QTensor` in place of one that the config quantizes.
        rhs: the same.
        seed: of the noise, uint32 of shape ``(2,)``; None seeds from the gradient.
        forward_scales: the scales of the forward pass, laid out so that they would
            multiply lhs; with them, gradients that are equal have other noise.

    Returns:
        The result, in `call.out_dtype`.
    """
    (lhs_ca, rhs_ca), _ = call.dims
    lhs, rhs = vary_together((lhs, rhs))
    fixed_lhs, fixed_rhs = lax.stop_gradient((lhs, rhs))
    noise_of = operands.Noise(seed, lax.stop_gradient(forward_scales), call.salt)
    lhs_path, rhs_path = f"{call.path}.lhs", f"{call.path}.rhs"
    lhs_q = operands.quantize(fixed_lhs, call.fwd.lhs, lhs_ca, lhs_path, noise_of)
    rhs_q = operands.quantize(fixed_rhs, call.fwd.rhs, rhs_ca, rhs_path)
    sums = _sum_products(call, fixed_lhs, fixed_rhs, lhs_q, rhs_q)
    # `jax.shard_map` without jit does not take a `custom_vjp` with symbolic zeros.
    finish = _jitted_straight_through if is_manual() else _straight_through
    return finish(call, sums, lhs, rhs, lhs_q, rhs_q, seed)


def _sum_products(
    call: Call,
    lhs: operands.Operand,
    rhs: operands.Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> jax.Array:
    """The bare dot, of integers where there are any."""
    raw = call.fwd
    lhs_in = operands.dot_input(lhs, lhs_q, raw.lhs, raw.dg_in_dtype)
    rhs_in = operands.dot_input(rhs, rhs_q, raw.rhs, raw.dg_in_dtype)
    result = call.order, call.out_sharding
    integers = [jnp.issubdtype(x.dtype, jnp.integer) for x in (lhs_in, rhs_in)]
    largest = operands.largest_stored(raw.lhs), operands.largest_stored(raw.rhs)
    if not any(integers):
        sums = lowering.float_dot(lhs_in, rhs_in, call.dims, *result)
    elif not all(integers):
        sums = lowering.mixed_dot(
            lhs_in, rhs_in, call.dims, *result, out_dtype=call.out_dtype
        )
    elif raw.dg_in_dtype is None:
        sums = lowering.integer_dot(lhs_in, rhs_in, call.dims, *result, largest=largest)
    else:
        sums = lowering.integer_dot_in_float(
            lhs_in, rhs_in, call.dims, raw.dg_in_dtype, *result, largest=largest
        )
    accumulator = raw.dg_accumulator_dtype
    is_float = accumulator is not None and jnp.issubdtype(accumulator, jnp.floating)
    return sums.astype(accumulator) if is_float else sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(
    call: Call,
    sums: jax.Array,
    lhs: operands.Operand,
    rhs: operands.Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
    seed: jax.Array | None,
) -> jax.Array:
    """The sums times the scales, as a function of the float operands."""
    del seed  # for the backward pass
    # That of rhs, mostly weights, goes first: integers times the scale of a large lhs
    # would overflow where the result does not.
    scales = []
    if rhs_q is not None and not call.fwd.rhs.use_fake_quant:
        scales.append(dn.rhs_scale_to_output(rhs_q.scale, call.dims, lhs.ndim))
    if lhs_q is not None and not call.fwd.lhs.use_fake_quant:
        scales.append(dn.lhs_scale_to_output(lhs_q.scale, call.dims, rhs.ndim))
    out = sums
    if scales:
        *first, last = (_laid_out(scale, call) for scale in scales)
        out = math.prod(first, start=out.astype(jnp.float32))
        out = exact.product(out, last)
    return out.astype(call.out_dtype)


def _laid_out(scale: jax.Array, call: Call) -> jax.Array:
    """A scale that is to multiply the sums, ordered and sharded as they are."""
    if call.order is not None:
        scale = scale.transpose(call.order)
    return sharded_like(scale, call.out_sharding)


def _straight_through_fwd(call, *primals):
    _, lhs, rhs, _, _, _ = primals
    differentiate_lhs = _is_perturbed(lhs)
    differentiate_rhs = _is_perturbed(rhs)
    sums, lhs, rhs, lhs_q, rhs_q, seed = jax.tree.map(
        lambda primal: primal.value, primals, is_leaf=_is_primal
    )
    for side, operand, is_differentiated in (
        ("lhs", lhs, differentiate_lhs),
        ("rhs", rhs, differentiate_rhs),
    ):
        if isinstance(operand, QTensor) and is_differentiated:
            raise TypeError(
                f"a gradient was asked with respect to {call.path}.{side}, a QTensor "
                f"of shape {operand.shape}: frozen integers are for serving and have "
                "no gradient. Train on the float variables and convert them again"
            )
    _check_second_derivative(call, differentiate_lhs, differentiate_rhs)
    inner = dataclasses.replace(
        call,
        lhs_is_differentiated=differentiate_lhs,
        rhs_is_differentiated=differentiate_rhs,
    )
    out = _straight_through(inner, sums, lhs, rhs, lhs_q, rhs_q, seed)
    lhs_saved = rhs_saved = lhs_mask = rhs_mask = None
    if differentiate_lhs:
        rhs_saved = _residual(rhs, rhs_q, call.dlhs)
        lhs_mask = _gradient_mask(lhs, lhs_q, call.fwd.lhs)
    if differentiate_rhs:
        lhs_saved = _residual(lhs, lhs_q, call.drhs)
        rhs_mask = _gradient_mask(rhs, rhs_q, call.fwd.rhs)
    scales: tuple[jax.Array | None, ...] = (None, None)
    if seed is None and (call.dlhs.lhs.needs_noise or call.drhs.lhs.needs_noise):
        scales = _scale_of(lhs_q), _scale_of(rhs_q)
    like = _Like.of(lhs), _Like.of(rhs)
    return out, (like, lhs_saved, rhs_saved, lhs_mask, rhs_mask, seed, scales)


def _scale_of(q: QTensor | None) -> jax.Array | None:
    return None if q is None else q.scale


def _scales_on_output(
    call: Call, scales: tuple[Any, Any], lhs_ndim: int, rhs_ndim: int
) -> tuple[jax.Array, ...]:
    """The scales of a forward contraction that multiply its output, laid out so."""
    lhs_scale, rhs_scale = scales
    (lhs_ca, rhs_ca), _ = call.dims
    laid_out = []
    if lhs_scale is not None and all(lhs_scale.shape[axis] == 1 for axis in lhs_ca):
        laid_out.append(dn.lhs_scale_to_output(lhs_scale, call.dims, rhs_ndim))
    if rhs_scale is not None and all(rhs_scale.shape[axis] == 1 for axis in rhs_ca):
        laid_out.append(dn.rhs_scale_to_output(rhs_scale, call.dims, lhs_ndim))
    return tuple(laid_out)


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _is_perturbed(operand: Any) -> bool:
    return any(p.perturbed for p in jax.tree.leaves(operand, is_leaf=_is_primal))


def _check_second_derivative(call, differentiate_lhs, differentiate_rhs):
    """Refuses a derivative of saved integers with respect to what they came from."""
    for gradient, other, raw, is_mixed in (
        ("rhs", "lhs", call.drhs, call.rhs_is_differentiated and differentiate_lhs),
        ("lhs", "rhs", call.dlhs, call.lhs_is_differentiated and differentiate_rhs),
    ):
        if is_mixed and raw.rhs.use_fwd_quant:
            raise ValueError(
                f"a second derivative was asked for of the gradient of {gradient} "
                f"with respect to {other}, but d{gradient}.rhs.use_fwd_quant=True "
                f"saves only the integers of {other}, which have none. Set it to "
                "False, for instance with config.fully_quantized(use_fwd_quant=False)"
            )


def _residual(x, q: QTensor | None, backward: config.DotGeneralRaw):
    """What the backward contraction reads of a forward operand."""
    return q if q is not None and backward.rhs.use_fwd_quant else x


def _gradient_mask(x, q: QTensor | None, tensor: config.Tensor):
    if q is None or not tensor.is_quantized or isinstance(x, QTensor):
        return None
    return tensor.grid.gradient_mask(quantizer.scaled(x, q.scale, tensor.grid))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Like:
    """What the gradient of an operand has to look like."""

    ndim: int
    dtype: np.dtype
    sharding: jax.sharding.NamedSharding | None

    @classmethod
    def of(cls, x: jax.Array | QTensor) -> "_Like":
        sharding = None if isinstance(x, QTensor) else explicit_sharding(x)
        return cls(x.ndim, np.dtype(x.dtype), sharding)


def _straight_through_bwd(call, residuals, g):
    (lhs_like, rhs_like), lhs, rhs, lhs_mask, rhs_mask, seed, scales = residuals
    dlhs = drhs = None
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None, None, None
    if call.order is not None:
        g = g.transpose(np.argsort(call.order))
    scales = _scales_on_output(call, scales, lhs_like.ndim, rhs_like.ndim)
    if rhs is not None:
        dims, order = dn.for_dlhs(call.dims, lhs_like.ndim, rhs_like.ndim)
        dlhs = _backward(
            call.dlhs, "dlhs", g, rhs, call.fwd.rhs, dims, order, lhs_like, seed, scales
        )
        dlhs = dlhs if lhs_mask is None else jnp.where(lhs_mask, dlhs, 0)
    if lhs is not None:
        dims, order = dn.for_drhs(call.dims, lhs_like.ndim, rhs_like.ndim)
        drhs = _backward(
            call.drhs, "drhs", g, lhs, call.fwd.lhs, dims, order, rhs_like, seed, scales
        )
        drhs = drhs if rhs_mask is None else jnp.where(rhs_mask, drhs, 0)
    return None, dlhs, drhs, None, None, None


_straight_through.defvjp(
    _straight_through_fwd, _straight_through_bwd, symbolic_zeros=True
)


_jitted_straight_through = jax.jit(_straight_through, static_argnums=0, inline=True)


def _backward(
    raw: config.DotGeneralRaw,
    path: str,
    g: jax.Array,
    other: jax.Array | QTensor,
    other_fwd: config.Tensor,
    dims: dn.DimensionNumbers,
    order: dn.Axes,
    like: _Like,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...],
) -> jax.Array:
    """One backward contraction: the gradient with what the forward pass left."""
    if isinstance(other, QTensor):
        can_move = _moves_onto_gradient(other.scale, dims)
        if can_move and raw.lhs.is_quantized:
            moved = dn.rhs_scale_to_lhs(other.scale, dims, g.ndim)
            g = (exact.float32(g) * moved).astype(operands.wide_dtype(g.dtype))
            unit = jnp.ones((1,) * other.ndim, jnp.float32)
            other = QTensor(other.qvalue, unit, other.dtype)
            taken = config.Tensor(
                numerics=other_fwd.grid, use_fake_quant=raw.lhs.use_fake_quant
            )
        else:
            other = other.dequant()
            taken = config.Tensor()
            if not can_move and other_fwd.use_fake_quant:
                # There are no integers to take, and nothing to simulate.
                taken = dataclasses.replace(raw.rhs, use_fwd_quant=False)
        raw = dataclasses.replace(raw, rhs=taken, dg_accumulator_dtype=None)
    out_sharding = like.sharding
    if raw.local_aqt is not None:
        g, other, dims = tiles.split(raw.local_aqt, path, g, other, dims)
        forward_scales = tuple(jnp.expand_dims(scale, 0) for scale in forward_scales)
        order = (0, *(axis + 1 for axis in order))
        if out_sharding is not None:
            out_sharding = out_sharding.update(spec=(None, *out_sharding.spec))
    call = Call(
        fwd=raw,
        dlhs=_FLOAT,
        drhs=_FLOAT,
        path=path,
        dims=dims,
        out_dtype=like.dtype if raw.local_aqt is None else np.dtype("float32"),
        order=order,
        out_sharding=out_sharding,
        salt={"dlhs": 1, "drhs": 2}[path],
    )
    out = quantize_and_contract(call, g, other, seed, forward_scales)
    if raw.local_aqt is not None:
        out = jnp.sum(out, axis=0).astype(like.dtype)
    return out


def _moves_onto_gradient(scale: jax.Array, dims: dn.DimensionNumbers) -> bool:
    """Whether the scale of a reused operand can multiply the gradient instead.

    One that varies along axes which remain, as one that varied along contracting axes
    in the forward pass does, cannot.
    """
    (_, other_ca), (_, other_ba) = dims
    remaining = dn.remaining_axes(scale.ndim, other_ca, other_ba)
    return all(scale.shape[axis] == 1 for axis in remaining)

"""A quantized `lax.dot_general` with custom gradients.

How one call runs. `make_dot_general` gives the public function. It checks the call,
quantizes the operands that the config quantizes, and hands both the float operands
and the integers to `_contract`. Only the integers are contracted; the float operands
are what the gradient belongs to (the straight-through estimator), and are saved for
the backward pass only where it quantizes them afresh. The two backward contractions
are calls of the same `_contract`, with a float backward of their own, so that second
derivatives exist.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config, exact, lowering, noise, quantizer
from aqtlite import dimension_numbers as dn
from aqtlite.qtensor import QTensor, axes_in_storage

DotGeneral = Callable[..., jax.Array]

_FLOAT = config.DotGeneralRaw()


@functools.cache
def make_dot_general(cfg: config.DotGeneral | None) -> DotGeneral:
    """Compiles a config into a function with the signature of `lax.dot_general`.

    The function is hashable, and the same object for equal configs, so that it goes
    where a static argument is wanted (``jnp.einsum(..., _dot_general=...)``).

    Args:
        cfg: what to quantize, and how. None, or a config that quantizes nothing,
            gives a function that calls `lax.dot_general`.

    Returns:
        ``dot_general(lhs, rhs, dimension_numbers, precision=None,
        preferred_element_type=None, *, out_sharding=None, key=None)``.

        - `lhs`, `rhs`: float32, bfloat16, float16 or float64 arrays, of equal dtypes
          or not, or a `QTensor` that was quantized with this config.
        - `precision`: None or DEFAULT. An integer contraction is exact and has no
          other; ask for one and it raises.
        - `preferred_element_type`: the dtype of the output. By default that of
          `lax.dot_general`: the operands' dtypes, promoted.
        - `out_sharding`: as in `lax.dot_general`.
        - `key`: seeds the noise of stochastic rounding in the backward pass. Without
          it the seed is made from the scales of the operands.

        Gradients pass the rounding unchanged (straight-through estimator, Bengio et
        al. 2013, arXiv:1308.3432). Where ``use_fwd_quant`` is set, the backward
        contraction takes the forward's integers as they are, and they alone are saved
        for it. Such integers are constants to a *second* differentiation: second
        derivatives with respect to one operand are there, mixed ones raise, and need
        ``use_fwd_quant=False``.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral` or None.

    >>> from aqtlite import config
    >>> dot_general = make_dot_general(config.fully_quantized(fwd_bits=8, bwd_bits=8))
    >>> x = jnp.array([[1.0, 2.0], [3.0, -4.0]])
    >>> dot_general(x, x, (((1,), (0,)), ((), ()))).round().tolist()
    [[7.0, -6.0], [-9.0, 22.0]]
    """
    if cfg is not None and not isinstance(cfg, config.DotGeneral):
        raise TypeError(
            "make_dot_general takes a config.DotGeneral or None, got "
            f"{type(cfg).__name__}; presets such as config.fully_quantized() make one"
        )
    if cfg is None or not cfg.is_quantized:
        return _unquantized
    return functools.partial(_dot_general, cfg)


def _unquantized(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`lax.dot_general`, with a `key` that it has no use for."""
    del key
    sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type, **sharding
    )


def _dot_general(
    cfg: config.DotGeneral,
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    key: jax.Array | None = None,
) -> jax.Array:
    _check_precision(precision)
    lhs = _check_operand(lhs, cfg.fwd.lhs, "fwd.lhs")
    rhs = _check_operand(rhs, cfg.fwd.rhs, "fwd.rhs")
    dims = dn.canonicalize(dimension_numbers, lhs.shape, rhs.shape)
    lhs, rhs, dims = _as_stored(lhs, rhs, dims)
    if preferred_element_type is None:
        out_dtype = jnp.result_type(lhs.dtype, rhs.dtype)
    else:
        out_dtype = jax.dtypes.canonicalize_dtype(preferred_element_type)
    call = _Call(
        fwd=cfg.fwd,
        dlhs=cfg.dlhs,
        drhs=cfg.drhs,
        path="fwd",
        dims=dims,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
    )
    seed = None if key is None else noise.seed_from_key(key)
    return _quantize_and_contract(call, lhs, rhs, seed)


def _as_stored(lhs, rhs, dims):
    """Contracts the axes of a `QTensor` where they lie; nothing is transposed."""
    stored_dims = tuple(
        (axes_in_storage(lhs, lhs_axes), axes_in_storage(rhs, rhs_axes))
        for lhs_axes, rhs_axes in dims
    )
    lhs, rhs = (
        dataclasses.replace(x, order=None) if isinstance(x, QTensor) else x
        for x in (lhs, rhs)
    )
    return lhs, rhs, stored_dims


def _check_precision(precision: Any) -> None:
    wanted = precision if isinstance(precision, tuple | list) else (precision,)
    for one in wanted:
        if one not in (None, lax.Precision.DEFAULT, "default", "DEFAULT", "fastest"):
            raise ValueError(
                f"precision={precision!r} was asked of a quantized contraction. Its "
                "integers are summed exactly, so there is no precision to choose; "
                "leave it None, or pass cfg=None to contract in floating point"
            )


def _check_operand(x: Any, tensor: config.Tensor, path: str) -> jax.Array | QTensor:
    if isinstance(x, QTensor):
        expected = tensor.grid.storage_dtype if tensor.is_quantized else None
        if x.qvalue.dtype != expected:
            held = "a float operand" if expected is None else f"{expected} integers"
            raise TypeError(
                f"{path} was given a QTensor of {x.qvalue.dtype} and shape {x.shape}, "
                f"but its config asks for {held}; quantize it with this config"
            )
        return x
    x = jnp.asarray(x)
    quantizer.check_floating(x, path)
    return x


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static about one contraction."""

    fwd: config.DotGeneralRaw
    dlhs: config.DotGeneralRaw
    drhs: config.DotGeneralRaw
    path: str  # where `fwd` stands in the user's config
    dims: dn.DimensionNumbers
    out_dtype: np.dtype
    out_sharding: Any = None
    # With respect to which operands the enclosing differentiation, if there is one,
    # differentiates.
    lhs_is_differentiated: bool = False
    rhs_is_differentiated: bool = False


def _quantize_and_contract(
    call: _Call,
    lhs: jax.Array | QTensor,
    rhs: jax.Array | QTensor,
    seed: jax.Array | None,
) -> jax.Array:
    (lhs_ca, rhs_ca), _ = call.dims
    lhs_q = _quantize_operand(lhs, call.fwd.lhs, lhs_ca, f"{call.path}.lhs", seed)
    rhs_q = _quantize_operand(rhs, call.fwd.rhs, rhs_ca, f"{call.path}.rhs", None)
    return _contract(call, lhs, rhs, lhs_q, rhs_q, seed)


def quantize_operands(
    cfg: config.DotGeneral,
    lhs: Any,
    rhs: Any,
    dims: dn.DimensionNumbers,
) -> tuple[QTensor | None, QTensor | None]:
    """The integers that the forward contraction of two operands would run on.

    Returns:
        A `QTensor` for each operand, None for one that stays in floating point.
    """
    lhs = _check_operand(lhs, cfg.fwd.lhs, "fwd.lhs")
    rhs = _check_operand(rhs, cfg.fwd.rhs, "fwd.rhs")
    (lhs_ca, rhs_ca), _ = dims
    return (
        _quantize_operand(lhs, cfg.fwd.lhs, lhs_ca, "fwd.lhs", None),
        _quantize_operand(rhs, cfg.fwd.rhs, rhs_ca, "fwd.rhs", None),
    )


def _quantize_operand(
    x: jax.Array | QTensor,
    tensor: config.Tensor,
    contracting: dn.Axes,
    path: str,
    seed: jax.Array | None,
) -> QTensor | None:
    """The integers of one operand, or None if it stays in floating point."""
    if isinstance(x, QTensor):
        _check_scale(x.scale.shape, tensor, contracting, path)
        return x
    if not tensor.is_quantized:
        return None
    x = lax.stop_gradient(x)
    scale = quantizer.calibrate(x, tensor, contracting, path)
    _check_scale(scale.shape, tensor, contracting, path)
    return quantizer.round_to_grid(x, scale, tensor, seed)


def _check_scale(
    scale_shape: tuple[int, ...],
    tensor: config.Tensor,
    contracting: dn.Axes,
    path: str,
) -> None:
    varying = [axis for axis in contracting if scale_shape[axis] != 1]
    if varying and not tensor.use_fake_quant:
        raise ValueError(
            f"{path}.calib_shared_axes={tensor.calib_shared_axes} leaves a scale of "
            f"shape {scale_shape} that varies along the contracting axes {varying}: "
            "it cannot be taken out of the sum. Share the scale along them too, or "
            f"set {path}.use_fake_quant=True"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(
    call: _Call,
    lhs: jax.Array | QTensor,
    rhs: jax.Array | QTensor,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
    seed: jax.Array | None,
) -> jax.Array:
    """Contracts the integers where there are any; differentiates lhs and rhs."""
    del seed  # for the backward pass
    raw = call.fwd
    lhs_in, lhs_scale = _dot_input(lhs, lhs_q, raw.lhs, raw.dg_in_dtype)
    rhs_in, rhs_scale = _dot_input(rhs, rhs_q, raw.rhs, raw.dg_in_dtype)
    integers = [
        jnp.issubdtype(operand.dtype, jnp.integer) for operand in (lhs_in, rhs_in)
    ]
    accumulator = raw.dg_accumulator_dtype
    if all(integers) and (accumulator is None or accumulator == jnp.int32):
        out = lowering.integer_dot(lhs_in, rhs_in, call.dims, call.out_sharding)
    else:
        if all(integers):
            lhs_in = lhs_in.astype(accumulator)
        if accumulator is None:
            is_plain = not any(integers) and raw.dg_in_dtype is None
            accumulator = call.out_dtype if is_plain else np.dtype("float32")
        out = lowering.float_dot(
            lhs_in, rhs_in, call.dims, accumulator, call.out_sharding
        )
    if lhs_scale is not None or rhs_scale is not None:
        out = out.astype(jnp.float32)
    if lhs_scale is not None:
        out = out * dn.lhs_scale_to_output(lhs_scale, call.dims, rhs.ndim)
    if rhs_scale is not None:
        out = out * dn.rhs_scale_to_output(rhs_scale, call.dims, lhs.ndim)
    return out.astype(call.out_dtype)


def _dot_input(
    x: jax.Array | QTensor,
    q: QTensor | None,
    tensor: config.Tensor,
    in_dtype: np.dtype | None,
) -> tuple[jax.Array, jax.Array | None]:
    """What goes into the dot for one operand, and the scale left for the output."""
    scale = None
    if q is None:
        values = jnp.asarray(x)
    elif tensor.use_fake_quant:
        values = q.dequant()
    else:
        values, scale = q.qvalue, q.scale
    return (values if in_dtype is None else values.astype(in_dtype)), scale


def _contract_fwd(call, lhs, rhs, lhs_q, rhs_q, seed):
    differentiate_lhs = _is_perturbed(lhs)
    differentiate_rhs = _is_perturbed(rhs)
    lhs, rhs, lhs_q, rhs_q, seed = jax.tree.map(
        lambda primal: primal.value, (lhs, rhs, lhs_q, rhs_q, seed), is_leaf=_is_primal
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
    out = _contract(inner, lhs, rhs, lhs_q, rhs_q, seed)
    lhs_saved = rhs_saved = lhs_mask = rhs_mask = None
    if differentiate_lhs:
        rhs_saved = _residual(rhs, rhs_q, call.dlhs)
        lhs_mask = _gradient_mask(lhs, lhs_q, call.fwd.lhs)
    if differentiate_rhs:
        lhs_saved = _residual(lhs, lhs_q, call.drhs)
        rhs_mask = _gradient_mask(rhs, rhs_q, call.fwd.rhs)
    operand_seed = None
    if seed is None and _needs_noise(call):
        # The operands tell apart two layers that will see the same gradient.
        operand_seed = noise.seed_from_bits(
            _scale_or_value(lhs, lhs_q), _scale_or_value(rhs, rhs_q)
        )
    like = _Like.of(lhs), _Like.of(rhs)
    seeds = seed, operand_seed
    return out, (like, lhs_saved, rhs_saved, lhs_mask, rhs_mask, seeds)


def _needs_noise(call: _Call) -> bool:
    return call.dlhs.lhs.needs_noise or call.drhs.lhs.needs_noise


def _scale_or_value(x: jax.Array | QTensor, q: QTensor | None) -> jax.Array:
    # Flat, so that the order in which frozen weights are stored does not matter.
    return exact.float32(jnp.asarray(x)) if q is None else q.scale.reshape(-1)


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
    return tensor.grid.gradient_mask(
        quantizer.scaled(x, q.scale / jnp.float32(tensor.grid.unit))
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Like:
    """What the gradient of an operand has to look like."""

    ndim: int
    dtype: np.dtype
    sharding: Any

    @classmethod
    def of(cls, x: jax.Array | QTensor) -> "_Like":
        sharding = getattr(jax.typeof(x), "sharding", None) if _is_array(x) else None
        return cls(x.ndim, np.dtype(x.dtype), sharding)


def _is_array(x: Any) -> bool:
    return not isinstance(x, QTensor)


def _contract_bwd(call, residuals, g):
    (lhs_like, rhs_like), lhs, rhs, lhs_mask, rhs_mask, seeds = residuals
    seed, operand_seed = seeds
    dlhs = drhs = None
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None, None
    if operand_seed is not None:
        seed = noise.combine(operand_seed, noise.seed_from_bits(exact.float32(g)))
    if rhs is not None:
        dims, order = dn.for_dlhs(call.dims, lhs_like.ndim, rhs_like.ndim)
        dlhs = _backward(
            call.dlhs, "dlhs", g, rhs, call.fwd.rhs, dims, order, lhs_like, seed
        )
        dlhs = dlhs if lhs_mask is None else jnp.where(lhs_mask, dlhs, 0)
    if lhs is not None:
        dims, order = dn.for_drhs(call.dims, lhs_like.ndim, rhs_like.ndim)
        drhs = _backward(
            call.drhs, "drhs", g, lhs, call.fwd.lhs, dims, order, rhs_like, seed
        )
        drhs = drhs if rhs_mask is None else jnp.where(rhs_mask, drhs, 0)
    return dlhs, drhs, None, None, None


_contract.defvjp(_contract_fwd, _contract_bwd, symbolic_zeros=True)


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
) -> jax.Array:
    """One backward contraction: the gradient with what the forward pass left."""
    if isinstance(other, QTensor):
        reuses_integers = raw.rhs.use_fwd_quant and raw.lhs.is_quantized
        if reuses_integers and not other_fwd.use_fake_quant:
            moved = dn.rhs_scale_to_lhs(other.scale, dims, g.ndim)
            g = (exact.float32(g) * moved).astype(_wide_dtype(g.dtype))
            unit = jnp.ones((1,) * other.ndim, jnp.float32)
            other = QTensor(other.qvalue, unit, other.dtype)
        else:
            other = other.dequant()
            if other_fwd.use_fake_quant:
                raw = dataclasses.replace(
                    raw, rhs=dataclasses.replace(raw.rhs, use_fwd_quant=False)
                )
    if raw.rhs.use_fwd_quant:
        # The forward's operand is used as it is: nothing left to quantize on it.
        raw = dataclasses.replace(raw, rhs=config.Tensor(), dg_accumulator_dtype=None)
    out_sharding = _gradient_sharding(like.sharding, order)
    if raw.local_aqt is not None:
        g, other, dims = _split_contraction(raw.local_aqt, path, g, other, dims)
    call = _Call(
        fwd=raw,
        dlhs=_FLOAT,
        drhs=_FLOAT,
        path=path,
        dims=dims,
        out_dtype=like.dtype if raw.local_aqt is None else np.dtype("float32"),
        out_sharding=out_sharding,
    )
    if seed is not None:
        seed = noise.fold_in(seed, {"dlhs": 1, "drhs": 2}[path])
    out = _quantize_and_contract(call, g, other, seed)
    if raw.local_aqt is not None:
        out = jnp.sum(out, axis=0).astype(like.dtype)
    return out.transpose(order)


def _wide_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")


def _gradient_sharding(sharding: Any, order: dn.Axes) -> Any:
    """The operand's sharding, for a result whose axes `order` will permute."""
    if sharding is None or sharding.mesh.empty:
        return None
    if not sharding.mesh.are_all_axes_explicit:
        return None
    spec = tuple(sharding.spec) + (None,) * (len(order) - len(sharding.spec))
    permuted = [spec[int(axis)] for axis in np.argsort(order)]
    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*permuted)
    )


def _split_contraction(
    local_aqt: config.LocalAqt,
    path: str,
    g: jax.Array,
    other: jax.Array | QTensor,
    dims: dn.DimensionNumbers,
) -> tuple[jax.Array, jax.Array | QTensor, dn.DimensionNumbers]:
    """Cuts the first contracting axis into tiles that become a leading batch axis."""
    (g_ca, other_ca), (g_ba, other_ba) = dims
    count = local_aqt.contraction_axis_shard_count
    if not g_ca:
        raise ValueError(
            f"{path}.local_aqt splits a contracting axis, but this contraction has "
            f"none: its gradient has shape {g.shape}; leave local_aqt None"
        )
    if g.shape[g_ca[0]] % count:
        raise ValueError(
            f"{path}.local_aqt.contraction_axis_shard_count={count} does not divide "
            f"the contracting axis {g_ca[0]} of the gradient of shape {g.shape}"
        )

    def tile(x: jax.Array, axis: int) -> jax.Array:
        tiles = (count, x.shape[axis] // count)
        shape = (*x.shape[:axis], *tiles, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    g = tile(g, g_ca[0])
    if isinstance(other, QTensor):
        scale = jnp.expand_dims(other.scale, 0)
        other = QTensor(tile(other.qvalue, other_ca[0]), scale, other.dtype)
    else:
        other = tile(other, other_ca[0])

    def shift(axes: dn.Axes) -> dn.Axes:
        return tuple(axis + 1 for axis in axes)

    return (
        g,
        other,
        ((shift(g_ca), shift(other_ca)), ((0, *shift(g_ba)), (0, *shift(other_ba)))),
    )

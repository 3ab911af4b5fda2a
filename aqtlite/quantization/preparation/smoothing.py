"""Smoothing: scales on the contracting axes that move from one operand to the other.

A contraction sums ``lhs_j rhs_j`` over channels j, so that ``lhs_j / s_j`` and
``rhs_j s_j`` give the same sums. `config.Smoothing` has the formula of ``s``. If ``s``
is a power of two, every product is the same float, bit for bit, unless a factor leaves
the range of normal numbers.

The factor of lhs, ``1 / s``, is computed here, keepdims with size 1 along the remaining
axes of lhs. A channel of zeros (or of subnormal numbers) in either operand has
``s = 1``. So has a channel with a NaN or an infinity, which then propagates as it would
without smoothing, and enters no statistics.

Scales from statistics are stored with them, in `SmoothingStatistics`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.calibration import counting, power_mean, scale_grids
from aqtlite.lowering import exact, fusion
from aqtlite.operations import SIDES, DotGeneral, Operation
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization.states import state_checks
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import replicated

# The grid given to calibrations: a symmetric one, so that they find magnitudes.
_GRID = numerics.IntSymmetric(bits=8)

_LARGEST = 2.0**62
"""Largest scale; its reciprocal is the smallest. Scales, their reciprocals and their
squares are all normal numbers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmoothingStatistics:
    """Statistics of both operands of a smoothing, and the scales from them.

    Fields without arrays are ``()``.
    """

    batches: jax.Array
    """Number of batches, float32."""

    lhs: Any = ()
    """State of the calibration of lhs, if it gathers statistics."""

    rhs: Any = ()
    """State of the calibration of rhs, if it gathers statistics."""

    lhs_factor: Any = ()
    """Factor of lhs, ``1 / s``, float32, keepdims."""

    absorbed: Any = ()
    """Factor of lhs that a preceding operation has absorbed, in place of
    `lhs_factor`."""

    @property
    def is_absorbed(self) -> bool:
        """Whether a preceding operation has absorbed the factor of lhs."""
        return bool(jax.tree.leaves(self.absorbed))

    def of(self, side: str) -> calibration.Statistics:
        """Statistics of one operand."""
        return calibration.Statistics(self.batches, getattr(self, side))


def dims_of(operation: Operation) -> dn.DimensionNumbers:
    """Returns the dimension numbers of a contraction with smoothing.

    Raises:
        ValueError: if the operation, such as a convolution, does not support smoothing.
    """
    if not isinstance(operation, DotGeneral):
        raise ValueError(
            f"fwd.smoothing was asked of a {operation.name}, but moves scales along "
            "the contracting axes of a dot_general or an einsum alone: set it to None"
        )
    return operation.dims


Masks = tuple[jax.Array | None, jax.Array | None]
"""For lhs and rhs, which elements count; None if all do."""


class Factors(NamedTuple):
    """The factors of both operands; None for an operand that is smooth already."""

    lhs: jax.Array | None
    rhs: jax.Array | None


def smooth(
    raw: config.DotGeneralRaw,
    lhs: Operand,
    rhs: Operand,
    dims: dn.DimensionNumbers,
    state: Any = (),
) -> tuple[Operand, Operand]:
    """Divides lhs by the scales of a smoothing, and multiplies rhs by them.

    The scales are constants to differentiation.

    Args:
        raw: config of the forward contraction; without smoothing nothing is changed.
        lhs: floating, or a `QTensor`, which has been smoothed already.
        rhs: like `lhs`.
        dims: canonical dimension numbers.
        state: state of a smoothing that gathers statistics.

    Returns:
        The operands. An operand that will be quantized is float32 (float64 for
        float64) unless its own dtype holds the products exactly; an operand that stays
        in floating point keeps its dtype.

    Raises:
        ValueError: if an operand is frozen and the scales are not, or if statistics
            are missing.
    """
    if raw.smoothing is None:
        return lhs, rhs
    found = factors(raw.smoothing, lhs, rhs, dims, state)
    tensors = raw.lhs, raw.rhs
    first, second = (
        x
        if factor is None or isinstance(x, QTensor)
        else _product(x, factor, _dtype(x.dtype, tensor, raw.smoothing))
        for x, tensor, factor in zip((lhs, rhs), tensors, found, strict=True)
    )
    return first, second


def factors(
    cfg: config.Smoothing,
    lhs: Operand,
    rhs: Operand,
    dims: dn.DimensionNumbers,
    state: Any = (),
) -> Factors:
    """Returns the factors of both operands, each of the rank of its operand.

    Args:
        cfg: the smoothing.
        lhs: floating, or a `QTensor`.
        rhs: like `lhs`.
        dims: canonical dimension numbers.
        state: state of a smoothing that gathers statistics.
    """
    is_absorbed = False
    if cfg.has_state:
        _check_given(cfg, state)
        is_absorbed = state.is_absorbed
        of_lhs = _ready(cfg, state, lhs.shape, dims)
    else:
        _check_floats(lhs, rhs)
        of_lhs = _lhs_factor(cfg, lhs, rhs, dims, None)
        # NaN and infinities propagate from the operands themselves.
        of_lhs = jnp.where(jnp.isfinite(of_lhs), of_lhs, jnp.float32(1))
    of_lhs = jax.lax.stop_gradient(of_lhs)
    of_rhs = 1 / dn.rhs_scale_to_lhs(of_lhs, dn.transpose(dims), rhs.ndim)
    return Factors(None if is_absorbed else of_lhs, of_rhs)


def init_state(
    cfg: config.Smoothing,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    dims: dn.DimensionNumbers,
) -> SmoothingStatistics:
    """Returns the state of a smoothing before the first batch, with NaN scales.

    Args:
        cfg: a smoothing with a calibration that gathers statistics.
        lhs_shape: shape of lhs.
        rhs_shape: shape of rhs.
        dims: canonical dimension numbers.
    """
    states: dict[str, Any] = {}
    for side, shape in zip(SIDES, (lhs_shape, rhs_shape), strict=True):
        how = _calibration(cfg, side)
        if how.has_state:
            axes = _remaining(dims, side, len(shape))
            states[side] = how.init_state(dn.shared_shape(shape, axes), _GRID)
    shared = _remaining(dims, "lhs", len(lhs_shape))
    shape = dn.shared_shape(lhs_shape, shared)
    return SmoothingStatistics(
        counting.no_batches(),
        **states,
        lhs_factor=jnp.full(shape, jnp.nan, jnp.float32),
    )


def update_state(
    cfg: config.Smoothing,
    state: Any,
    lhs: Operand,
    rhs: Operand,
    dims: dn.DimensionNumbers,
    masks: Masks = (None, None),
) -> Any:
    """Returns the state of a smoothing after one more batch.

    Args:
        cfg: a smoothing with a calibration that gathers statistics.
        state: as `init_state` returns it; unchanged if its factor is absorbed.
        lhs: floating; with a `QTensor` on either side the state is unchanged.
        rhs: like `lhs`.
        dims: canonical dimension numbers.
        masks: bool arrays of the shapes of the operands, True for elements that count;
            None for all. A batch with none, or one not finite, changes nothing.

    Raises:
        ValueError: if the state is of another calibration.
    """
    _check_given(cfg, state)
    if state.is_absorbed or isinstance(lhs, QTensor) or isinstance(rhs, QTensor):
        return state
    states = {}
    enters = jnp.bool_(True)
    for side, x, mask in zip(SIDES, (lhs, rhs), masks, strict=True):
        how, axes = _calibration(cfg, side), _remaining(dims, side, x.ndim)
        fixed, before = exact.float32(jax.lax.stop_gradient(x)), state.of(side)
        if mask is not None:
            fixed = jnp.where(mask, fixed, jnp.float32(0))
            enters &= jnp.any(mask)
        enters &= counting.is_finite(fixed, axes)
        if not how.has_state:
            continue
        name = f"fwd.smoothing.{side}_calibration"
        state_checks.check_calibration(how, _GRID, before.state, name, x.ndim)
        if mask is None:
            states[side] = how.update(before, fixed, axes, _GRID)
        else:
            states[side] = how.masked_update(before, fixed, mask, axes, _GRID)
    after = SmoothingStatistics(state.batches + 1, **states)
    of_lhs = _lhs_factor(cfg, lhs, rhs, dims, after, masks)
    _check_shape(of_lhs.shape, state.lhs_factor.shape)
    after = dataclasses.replace(after, lhs_factor=of_lhs)
    return counting.chosen(enters, after, state)


def _calibration(cfg: config.Smoothing, side: str) -> calibration.Calibration:
    return cfg.lhs_calibration if side == "lhs" else cfg.rhs_calibration


def _remaining(dims: dn.DimensionNumbers, side: str, ndim: int) -> dn.Axes:
    contracting, batch = (pair[SIDES.index(side)] for pair in dims)
    return dn.remaining_axes(ndim, contracting, batch)


def _magnitudes(
    cfg: config.Smoothing,
    side: str,
    x: Any,
    dims: dn.DimensionNumbers,
    statistics: SmoothingStatistics | None,
    mask: jax.Array | None,
) -> jax.Array | None:
    """The magnitude of each channel; None if the scales do not depend on it."""
    exponent = cfg.lhs_exponent if side == "lhs" else cfg.rhs_exponent
    if not exponent:
        return None
    how = _calibration(cfg, side)
    axes = _remaining(dims, side, x.ndim)
    fixed = exact.float32(jax.lax.stop_gradient(x))
    given = statistics.of(side) if statistics is not None and how.has_state else ()
    if mask is None or how.has_state:
        found = how.range(fixed, axes, _GRID, given)
    else:
        kept = jnp.where(mask, fixed, jnp.float32(0))
        found = how.masked_range(kept, mask, axes, _GRID)
    where = f"fwd.smoothing.{side}_calibration"
    if not isinstance(found, calibration.Range) or found.low is not None:
        raise TypeError(
            f"{where}={how!r} must give one magnitude for each channel, and gives "
            f"{found!r}; take one for symmetric grids, such as calibration.AbsMax()"
        )
    _check_shape(found.high.shape, dn.shared_shape(x.shape, axes))
    # Each operand is multiplied by a factor of both.
    return fusion.barrier(replicated(found.high))


def _lhs_factor(
    cfg: config.Smoothing,
    lhs: Any,
    rhs: Any,
    dims: dn.DimensionNumbers,
    statistics: SmoothingStatistics | None,
    masks: Masks = (None, None),
) -> jax.Array:
    """Computes ``1 / s``, keepdims of lhs; NaN where a magnitude is not finite.

    Args:
        cfg: the smoothing.
        lhs: floating.
        rhs: floating.
        dims: canonical dimension numbers.
        statistics: statistics of the operands, None if none are gathered.
        masks: as in `update_state`.
    """
    of_lhs = _magnitudes(cfg, "lhs", lhs, dims, statistics, masks[0])
    of_rhs = _magnitudes(cfg, "rhs", rhs, dims, statistics, masks[1])
    if of_rhs is not None:
        of_rhs = dn.rhs_scale_to_lhs(of_rhs, dims, lhs.ndim)
    present = [m for m in (of_lhs, of_rhs) if m is not None]
    tiny = jnp.finfo(jnp.float32).tiny
    has_values = jnp.bool_(True)
    is_finite = jnp.bool_(True)
    for one in present:
        has_values = has_values & (one >= tiny)
        is_finite = is_finite & jnp.isfinite(one)
    up, down = (
        jnp.float32(1)
        if one is None
        else power_mean.power(jnp.where(has_values, one, jnp.float32(1)), exponent)
        for one, exponent in ((of_rhs, cfg.rhs_exponent), (of_lhs, cfg.lhs_exponent))
    )
    factor = jnp.clip(up / down, 1 / _LARGEST, _LARGEST)
    if cfg.po2_scale:
        factor = scale_grids.nearest_power_of_two(factor)
    factor = jnp.where(is_finite, factor, jnp.float32(jnp.nan))
    # Its consumers are compiled alike, whether it is computed or given.
    return fusion.barrier(factor)


def _dtype(dtype: Any, tensor: config.Tensor, cfg: config.Smoothing) -> np.dtype:
    """The dtype of a smoothed operand."""
    own = np.dtype(dtype)
    # A power of two times a bfloat16 is a bfloat16.
    is_held = own in (np.dtype(jnp.bfloat16), np.float64) and cfg.po2_scale
    if is_held or own == np.float64 or not tensor.is_quantized:
        return own
    return np.dtype("float32")


def _product(x: jax.Array, factor: jax.Array, dtype: np.dtype) -> jax.Array:
    return exact.scaled(jnp.asarray(x), factor).astype(dtype)


def _check_given(cfg: config.Smoothing, state: Any) -> None:
    """Checks that a smoothing that gathers statistics was given its state.

    Raises:
        ValueError: if there is no state.
        TypeError: if the state is not `SmoothingStatistics`, or was cast.
    """
    if not jax.tree.leaves(state):
        raise ValueError(
            f"fwd.smoothing={cfg!r} gathers statistics, and was given none: pass "
            "states= (aqtlite.statistics makes them), or use calibrations that look at "
            "the array alone, such as calibration.AbsMax()"
        )
    if not isinstance(state, SmoothingStatistics):
        raise TypeError(
            f"fwd.smoothing takes SmoothingStatistics, got {type(state).__name__}: "
            "aqtlite.restored_statistics makes them of what a checkpoint holds"
        )
    known = state.batches, state.lhs_factor, state.absorbed
    state_checks.check_float32(known, "fwd.smoothing")


def _ready(
    cfg: config.Smoothing,
    state: SmoothingStatistics,
    lhs_shape: Any,
    dims: dn.DimensionNumbers,
) -> jax.Array:
    """Returns the factor of lhs in a state.

    Raises:
        ValueError: if the state is known to be of no batch, or if the factor has
            another shape.
    """
    problem = counting.problem(state.batches)
    if problem is not None:
        raise ValueError(f"fwd.smoothing has {problem}: {counting.REMEDY}")
    found: jax.Array = state.absorbed if state.is_absorbed else state.lhs_factor
    shared = _remaining(dims, "lhs", len(lhs_shape))
    _check_shape(found.shape, dn.shared_shape(lhs_shape, shared))
    return found


def _check_floats(lhs: Operand, rhs: Operand) -> None:
    for side, x in zip(SIDES, (lhs, rhs), strict=True):
        if isinstance(x, QTensor):
            raise ValueError(
                f"fwd.{side} is a QTensor of shape {x.shape}, but fwd.smoothing "
                "computes its scales from both operands at every call. Take them from "
                "statistics: fwd.smoothing.lhs_calibration="
                "calibration.MaxOverBatches()"
            )


def _check_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        raise ValueError(
            f"fwd.smoothing has one magnitude for each channel of the contracting and "
            f"batch axes, of shape {tuple(wanted)}, and found {tuple(found)}; for "
            "statistics, another batch may have had another shape"
        )

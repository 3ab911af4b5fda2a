"""An independent model of a quantized contraction in NumPy, with error bounds.

It reads the library's configs as data and shares none of its arithmetic. The few
operations that decide an integer are done in float32 as the library documents them:

- ``bound = max(|x|) * float32(clipping_scale)``, over the axes that share a scale;
- ``scale = bound * (float32(1) / float32(grid_bound))``, 1 where that is subnormal;
- ``x * (1 / scale)``, rounded half to even or, on grids of halves, floored.

Everything behind them is exact (float64 holds sums of products of integers below
2^53), so that a result comes as an *interval* around the exact one. What widens it:

- one rounding, 2^-24, for each float32 operation behind the sums: their conversion and
  the product with each scale;
- where a contraction runs in floating point, ``n * 2^-24 * sum(|a b|)`` for n products
  summed in float32 in any order (Higham, Accuracy and Stability, section 3.1);
- half a unit in the last place for a dequantized operand in its own dtype;
- where floats meet integers, 2^-22 of the largest float along the contracting axes for
  each float (three int8 digits), or 2^-14 where floats have 16 bits (two digits);
- an infinity, where a sum of floats or a sum times the scale of rhs exceeds float32;
- for stochastic rounding, the distance between the two neighbours on the grid;
- 2^-126 for what CPUs flush to zero.

Rounding is monotonic: an output in bfloat16 or float16 has to lie between the rounded
ends of its interval. For float32 operations on integers that is the output itself or
a neighbour; an output whose interval does not straddle a tie has one value.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite import config, numerics

UNIT = 2.0**-24
"""The relative error of one rounding to float32."""
MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-126
"""Below this, float32 values are subnormal."""
# The reciprocal of a scale beyond 2^126 would be subnormal.
_HEADROOM = np.float32(2.0**-32)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What the grid makes of an array: ``(values + [0, spread]) * scale``."""

    values: np.ndarray  # float64: stored integers, doubled on grids of halves
    spread: np.ndarray | float  # how far noise may lift them
    scale: np.ndarray  # float32 of the same rank
    passes: np.ndarray | bool  # where the gradient passes


@dataclasses.dataclass(frozen=True)
class Factor:
    """An operand as the contraction takes it: within `radius` of `values`."""

    values: np.ndarray  # float64
    radius: np.ndarray | float
    scale: np.ndarray | None  # that multiplies the sums, None where there is none
    is_integer: bool
    dtype: np.dtype | None = None  # of floats


@dataclasses.dataclass(frozen=True)
class Interval:
    """Numbers within `radius` of `center`."""

    center: np.ndarray
    radius: np.ndarray

    def ends(self, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """The ends, rounded to a dtype; in float64."""
        # By way of float32, as the library's.
        return tuple(
            end.astype(np.float32).astype(dtype).astype(np.float64)
            for end in (self.center - self.radius, self.center + self.radius)
        )


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of both operands and of the result, a letter for each."""

    lhs: str
    rhs: str
    out: str
    last: str = ""  # the last of those that are summed over, which blocks cut

    @classmethod
    def of(cls, dims: Any, lhs_ndim: int, rhs_ndim: int) -> "Axes":
        """The letters for the dimension numbers of a `dot_general`."""
        (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
        lhs = [chr(ord("a") + axis) for axis in range(lhs_ndim)]
        rhs = [chr(ord("n") + axis) for axis in range(rhs_ndim)]
        for left, right in zip((*lhs_ca, *lhs_ba), (*rhs_ca, *rhs_ba), strict=True):
            rhs[right] = lhs[left]
        batch = [lhs[axis] for axis in lhs_ba]
        out = batch + [one for one in lhs if one not in rhs]
        out += [one for one in rhs if one not in lhs]
        last = lhs[lhs_ca[-1]] if lhs_ca else ""
        return cls("".join(lhs), "".join(rhs), "".join(out), last)

    def gradient(self, own: str, other: str) -> "Axes":
        """Those of the contraction that gives the gradient of an operand."""
        summed = [one for one in other if one in self.out and one not in own]
        return Axes(self.out, other, own, summed[-1] if summed else "")

    def contracting(self, operand: str) -> tuple[int, ...]:
        """The places in `operand` of the axes that are summed over."""
        return tuple(i for i, one in enumerate(operand) if one not in self.out)


def run(
    cfg: config.DotGeneral,
    lhs: np.ndarray,
    rhs: np.ndarray,
    g: np.ndarray,
    dims: Any,
) -> tuple[Interval, Interval, Interval]:
    """The output and both gradients for the cotangent `g`.

    Args:
        cfg: what is quantized, and how.
        lhs: float32, bfloat16 or float16.
        rhs: the same.
        g: the same, in the shape and dtype of the output.
        dims: dimension numbers of `jax.lax.dot_general`.
    """
    axes = Axes.of(dims, lhs.ndim, rhs.ndim)
    if axes.last and _products(lhs, axes.lhs, axes) == 1:
        cfg = config.DotGeneral()
    with np.errstate(all="ignore"):
        lhs_q = _quantize(lhs, cfg.fwd.lhs, axes, axes.lhs)
        rhs_q = _quantize(rhs, cfg.fwd.rhs, axes, axes.rhs)
        out = _contract(
            cfg.fwd,
            _factor(lhs, lhs_q, cfg.fwd.lhs, cfg.fwd.dg_in_dtype),
            _factor(rhs, rhs_q, cfg.fwd.rhs, cfg.fwd.dg_in_dtype),
            axes,
        )
        for_lhs = axes.gradient(axes.lhs, axes.rhs)
        for_rhs = axes.gradient(axes.rhs, axes.lhs)
        dlhs = _gradient(cfg.dlhs, g, rhs, rhs_q, cfg.fwd.rhs, for_lhs)
        drhs = _gradient(cfg.drhs, g, lhs, lhs_q, cfg.fwd.lhs, for_rhs)
        return out, _masked(dlhs, lhs_q), _masked(drhs, rhs_q)


def _products(x: np.ndarray, letters: str, axes: Axes) -> int:
    """The number of products in a sum, of which a single one is left in float."""
    return math.prod(x.shape[i] for i in axes.contracting(letters))


def _masked(gradient: Interval, q: Quantized | None) -> Interval:
    """The straight-through estimator: nothing passes where the grid has clipped."""
    passes = True if q is None else q.passes
    return Interval(
        np.where(passes, gradient.center, 0.0), np.where(passes, gradient.radius, 0.0)
    )


# One operand.


def _quantize(
    x: np.ndarray, tensor: config.Tensor, axes: Axes, letters: str
) -> Quantized | None:
    grid = tensor.numerics
    if isinstance(grid, numerics.NoNumerics):
        return None
    scale = _scale(x, tensor, axes, letters)
    scaled = _scaled(x, scale)
    has_zero = grid.preserve_zero
    last = _last_point(grid)
    unit = 1.0 if has_zero else 0.5
    edge = last if grid.clip else _storage_limit(grid) * unit
    clipped = np.clip(scaled.astype(np.float64), -edge, edge)
    spread: np.ndarray | float = 0.0
    if grid.stochastic_rounding:
        # Between two neighbours, of which the lower one is here.
        shift = 0.0 if has_zero else 0.5
        points = np.floor(clipped - shift) + shift
        spread = np.where(points == clipped, 0.0, 1.0 / unit)
    else:
        points = np.rint(clipped) if has_zero else np.floor(clipped) + 0.5
    values = np.nan_to_num(points / unit)
    passes = not (grid.clip and grid.clip_gradient) or np.abs(scaled) <= edge
    return Quantized(values, spread, scale * np.float32(unit), passes)


def _last_point(grid: numerics.IntSymmetric) -> float:
    return 2.0 ** (grid.bits - 1) - (1.0 if grid.preserve_zero else 0.5)


def _storage_limit(grid: numerics.IntSymmetric) -> int:
    """The largest integer of the narrowest of int4, int8 and int16 that does."""
    largest = _last_point(grid) * (1 if grid.preserve_zero else 2)
    return next(limit for limit in (7, 127, 32767) if largest <= limit)


def _scale(
    x: np.ndarray, tensor: config.Tensor, axes: Axes, letters: str
) -> np.ndarray:
    """float32, of size 1 along the axes that share a scale, repeated over blocks."""
    if tensor.blocks is None:
        bound = _largest(x, tensor, axes.contracting(letters))
    else:
        bound = _largest_of_blocks(x, tensor.blocks, axes, letters)
    clipping_scale = tensor.calibration.clipping_scale
    if clipping_scale is not None:
        bound = bound * np.float32(clipping_scale)
    grid = tensor.numerics
    reach = _last_point(grid) + (0.0 if grid.preserve_max_val else 0.5)
    scale = bound * (np.float32(1) / np.float32(reach))
    scale = np.where(np.isfinite(scale), scale, np.float32(np.nan))
    is_empty = scale < np.float32(TINY)
    scale = np.where(is_empty, np.float32(1), scale)
    if tensor.po2_scale:
        mantissa, exponent = np.frexp(scale)
        power = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
        scale = np.where(np.isfinite(scale), power, scale)
    if not grid.preserve_zero:
        # The grid has no zero: its scale is.
        scale = np.where(is_empty, np.float32(0), scale)
    return scale


def _largest(
    x: np.ndarray, tensor: config.Tensor, contracting: tuple[int, ...]
) -> np.ndarray:
    shared = tensor.calib_shared_axes
    if shared is None:
        shared = contracting
    elif shared == "per_tensor":
        shared = tuple(range(x.ndim))
    magnitude = np.abs(x.astype(np.float32))
    return np.max(magnitude, axis=shared, keepdims=True, initial=0)


def _largest_of_blocks(
    x: np.ndarray, blocks: config.Blocks, axes: Axes, letters: str
) -> np.ndarray:
    """The largest magnitude of the block of each element."""
    kept = [i for i, one in enumerate(letters) if one in axes.out]
    sizes = {letters.index(axes.last): blocks.size} if axes.last else {}
    if kept:
        sizes[kept[-1]] = blocks.remaining_size
    bound = np.abs(x.astype(np.float32))
    for axis, size in sizes.items():
        if blocks.fit:
            sizes_that_fit = (n for n in range(1, size + 1) if x.shape[axis] % n == 0)
            size = max(sizes_that_fit, default=1)
        starts = np.arange(0, x.shape[axis], size)
        largest = np.maximum.reduceat(bound, starts, axis) if x.size else bound
        is_one = len(starts) <= 1
        if is_one or not x.size:
            bound = largest
        else:  # The last block may be shorter.
            repeated = np.repeat(largest, size, axis)
            bound = np.take(repeated, np.arange(x.shape[axis]), axis)
    return bound


def _scaled(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``x * (1 / scale)`` in float32, as if its exponents had no end."""
    x = x.astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    is_huge = scale >= np.float32(2.0**96)
    factor = np.where(is_huge, _HEADROOM, np.float32(1))
    return (x * factor) * (np.float32(1) / (scale * factor))


def _factor(
    x: np.ndarray,
    q: Quantized | None,
    tensor: config.Tensor,
    in_dtype: np.dtype | None,
) -> Factor:
    if q is None:
        values = x if in_dtype is None else x.astype(in_dtype)
        return Factor(values.astype(np.float64), 0.0, None, False, values.dtype)
    if tensor.use_fake_quant:
        return _dequantized(q, (x.dtype, in_dtype))
    return Factor(q.values + q.spread / 2, q.spread / 2, q.scale, True)


def _dequantized(q: Quantized, dtypes: Sequence[np.dtype | None]) -> Factor:
    """In floating point; the roundings to any of `dtypes` may or may not be there."""
    scale = q.scale.astype(np.float64)
    values = (q.values + q.spread / 2) * scale
    radius = q.spread / 2 * scale
    limits = [jnp.finfo(one) for one in dtypes if one is not None]
    relative = UNIT + sum(float(one.eps) / 2 for one in limits)
    absolute = sum(float(one.smallest_subnormal) / 2 for one in limits)
    radius = radius + relative * (np.abs(values) + radius) + absolute
    return Factor(values, radius, None, False)


# Contractions.


def _contract(raw: config.DotGeneralRaw, x: Factor, y: Factor, axes: Axes) -> Interval:
    def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.einsum(f"{axes.lhs},{axes.rhs}->{axes.out}", a, b)

    def full(radius: np.ndarray | float, values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.asarray(radius, np.float64), values.shape)

    x_radius = full(_radius(x, y, axes.contracting(axes.lhs)), x.values)
    y_radius = full(_radius(y, x, axes.contracting(axes.rhs)), y.values)
    x_size, y_size = np.abs(x.values), np.abs(y.values)
    x_radius, y_radius = np.copy(x_radius), np.copy(y_radius)
    sums = dot(x_size, y_size)
    tiles = 0.0
    if _is_in_tiles(x, axes.contracting(axes.lhs)) or _is_in_tiles(
        y, axes.contracting(axes.rhs)
    ):
        # Each tile is scaled, in float32, and added to the others.
        tiles = float(np.prod([x.values.shape[i] for i in axes.contracting(axes.lhs)]))
        x, x_radius = _with_scale(x, x_radius)
        y, y_radius = _with_scale(y, y_radius)
        x_size, y_size = np.abs(x.values), np.abs(y.values)
    center = dot(x.values, y.values)
    radius = dot(x_size, y_radius) + dot(x_radius, y_size) + dot(x_radius, y_radius)
    magnitude = dot(x_size + x_radius, y_size + y_radius)
    products = np.prod([x.values.shape[i] for i in axes.contracting(axes.lhs)])
    radius += _sum_error(raw, x, y, sums, magnitude, float(products))
    radius += 1.01 * (tiles + 3 * (tiles > 0)) * UNIT * magnitude
    roundings = 0
    of_integers = x.is_integer and y.is_integer
    overflows = (magnitude > MAX) & (not of_integers)
    for factor, letters in ((y, axes.rhs), (x, axes.lhs)):
        overflows |= np.abs(center) + radius > MAX
        if factor.scale is not None:
            scale = _along(factor.scale.astype(np.float64), letters, axes.out)
            center, radius = center * scale, radius * scale
            roundings += 1
    if roundings:
        radius = radius + (roundings + 1.01) * UNIT * (np.abs(center) + radius)
    return Interval(center, np.where(overflows, np.inf, radius + TINY))


def _is_in_tiles(x: Factor, contracting: tuple[int, ...]) -> bool:
    """Returns True if the scale varies along what is summed over."""
    return x.scale is not None and any(x.scale.shape[i] != 1 for i in contracting)


def _with_scale(x: Factor, radius: np.ndarray) -> tuple[Factor, np.ndarray]:
    """The factor, and its radius, times its scale."""
    if x.scale is None:
        return x, radius
    scale = x.scale.astype(np.float64)
    return dataclasses.replace(x, values=x.values * scale, scale=None), radius * scale


def _radius(x: Factor, other: Factor, contracting: tuple[int, ...]) -> Any:
    """How far an operand may be off, by its digits where it has any."""
    if x.is_integer or not other.is_integer:
        return x.radius
    is_half = x.dtype is not None and jnp.finfo(x.dtype).bits == 16
    largest = np.max(np.abs(x.values), contracting, keepdims=True, initial=0)
    return x.radius + largest * 2.0 ** (-14 if is_half else -22) + TINY


def _sum_error(
    raw: config.DotGeneralRaw,
    x: Factor,
    y: Factor,
    sums: np.ndarray,
    magnitude: np.ndarray,
    products: float,
) -> np.ndarray | float:
    """How far the sums may be off, whatever the order in which they are taken."""
    of_integers, accumulator = x.is_integer and y.is_integer, raw.dg_accumulator_dtype
    is_int32 = accumulator is None and raw.dg_in_dtype is None
    if of_integers and (is_int32 or accumulator == np.dtype("int32")):
        return 0.0
    narrow = accumulator is not None and accumulator == jnp.bfloat16
    unit = 2.0**-8 if narrow else UNIT
    error = 1.01 * (products + 1) * unit * magnitude + products * TINY
    # Partial sums of integers that the accumulator holds are exact.
    return np.where(sums <= 1 / unit, 0.0, error) if of_integers else error


def _along(scale: np.ndarray, letters: str, target: str) -> np.ndarray:
    """Lays a keepdims scale out along the axes of `target`, those it has."""
    common = [one for one in target if one in letters]
    dropped = tuple(i for i, one in enumerate(letters) if one not in target)
    kept = "".join(one for one in letters if one in target)
    ordered = np.einsum(f"{kept}->{''.join(common)}", np.squeeze(scale, dropped))
    sizes = iter(ordered.shape)
    return ordered.reshape([next(sizes) if one in letters else 1 for one in target])


def _gradient(
    raw: config.DotGeneralRaw,
    g: np.ndarray,
    other: np.ndarray,
    other_q: Quantized | None,
    other_fwd: config.Tensor,
    axes: Axes,
) -> Interval:
    """One backward contraction: the cotangent with a forward operand.

    `use_fwd_quant` takes the forward's integers, their scale moved onto the cotangent.
    Fake quantization simulates that, wherever a scale can be moved.
    """
    is_reused = raw.rhs.use_fwd_quant and other_q is not None
    if _products(g, axes.lhs, axes) == 1:
        raw = config.DotGeneralRaw()
    is_varying = is_reused and any(
        other_q.scale.shape[i] != 1
        for i, one in enumerate(axes.rhs)
        if one in axes.out
        if one not in axes.lhs
    )
    y: Factor | None = None
    blocks = other_fwd.blocks
    is_square = blocks is not None and blocks.remaining_size > 1
    is_stored = not other_fwd.use_fake_quant
    if is_reused and is_varying and is_square and is_stored and raw.lhs.is_integer:
        y = Factor(other_q.values, 0.0, other_q.scale, True)
    elif is_reused and is_varying and not (blocks is None and is_stored):
        # No integers to take: the dequantized operand, and its own grid if any.
        wide = other_q.values.astype(np.float32) * other_q.scale
        other, is_reused = wide.astype(other.dtype), False
    elif is_reused and raw.lhs.is_quantized:
        moved = _along(other_q.scale, axes.rhs, axes.lhs)
        g = g.astype(np.float32) * moved
        y = Factor(other_q.values, 0.0, None, True)
    elif is_reused:
        y = _dequantized(other_q, (other.dtype, raw.dg_in_dtype))
    if raw.local_aqt is None:
        return _quantize_and_contract(raw, g, other, y, axes)
    return _in_tiles(raw, g, other, y, axes)


def _quantize_and_contract(
    raw: config.DotGeneralRaw,
    g: np.ndarray,
    other: np.ndarray,
    y: Factor | None,
    axes: Axes,
) -> Interval:
    g_q = _quantize(g, raw.lhs, axes, axes.lhs)
    x = _factor(g, g_q, raw.lhs, raw.dg_in_dtype)
    if y is None:
        other_q = _quantize(other, raw.rhs, axes, axes.rhs)
        y = _factor(other, other_q, raw.rhs, raw.dg_in_dtype)
    return _contract(raw, x, y, axes)


def _in_tiles(
    raw: config.DotGeneralRaw,
    g: np.ndarray,
    other: np.ndarray,
    y: Factor | None,
    axes: Axes,
) -> Interval:
    """Sub-channel tiles: the first contracting axis of the cotangent, cut."""
    count = raw.local_aqt.contraction_axis_shard_count
    cut = axes.lhs[axes.contracting(axes.lhs)[0]]

    def tile(x: np.ndarray, letters: str) -> np.ndarray:
        axis = letters.index(cut)
        pieces = (count, x.shape[axis] // count)
        return x.reshape(*x.shape[:axis], *pieces, *x.shape[axis + 1 :])

    def named(letters: str) -> str:
        return letters.replace(cut, "z" + cut)

    tiled = Axes(named(axes.lhs), named(axes.rhs), "z" + axes.out)
    if y is not None:
        radius = np.broadcast_to(np.asarray(y.radius, np.float64), y.values.shape)
        values, radius = tile(y.values, axes.rhs), tile(radius, axes.rhs)
        y = dataclasses.replace(y, values=values, radius=radius)
    parts = _quantize_and_contract(
        raw, tile(g, axes.lhs), tile(other, axes.rhs), y, tiled
    )
    magnitude = np.sum(np.abs(parts.center) + parts.radius, axis=0)
    radius = np.sum(parts.radius, axis=0) + 1.01 * count * UNIT * magnitude
    return Interval(np.sum(parts.center, axis=0), radius)

"""From the range that a calibration found to the scale and the zero point of a grid."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import scale_grids
from aqtlite.calibration.base import Range
from aqtlite.lowering import exact
from aqtlite.lowering.elementwise import Elementwise
from aqtlite.numerics import Numerics
from aqtlite.shapes.dimension_numbers import Axes


def scale_and_zero_point(
    found: Range,
    grid: Numerics,
    *,
    po2: bool,
    dtype: np.dtype | None = None,
    scale_shared: Axes | None = None,
    empty: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The scale of stored values, and the zero point if the grid has one.

    For a grid with a `calibrated_range` from ``a`` to ``b``, the scale is
    ``(high - low) / (b - a)`` and the zero point ``a - round(low / scale)``. The range
    is first widened to contain zero, so that zero is a stored value (Jacob et al. 2018,
    arXiv:1712.05877).

    Args:
        found: range from the calibration.
        grid: number grid.
        po2: round the scale up to a power of two.
        dtype: round the scale to values of this dtype, None for float32.
        scale_shared: axes along which scales share the number that `dtype` may need,
            as in `scale_grids.round_scale`.
        empty: scale of an all-zero channel; None for one stored unit, or for 0 on a
            grid without zero, whose values it makes zero.

    Returns:
        The scale, float32, and the zero point, int32 or None, of the range's shape.

    Raises:
        ValueError: if the grid has a zero point and the range has no `low`, or vice
            versa.
    """
    limits = grid.calibrated_range
    if (limits is None) != (found.low is None):
        has, lacks = "a zero point", "no smallest value"
        fitting = "calibration.MinMax(), or numerics.IntSymmetric(...)"
        if found.low is not None:
            has, lacks = "no zero point", "a smallest value"
            fitting = "calibration.AbsMax(), or numerics.IntAffine(...)"
        raise ValueError(
            f"the grid {grid!r} has {has}, but its calibration gives {lacks}; "
            f"choose a calibration (or its `of`) for such grids, such as {fitting}"
        )
    if empty is None:
        empty = grid.unit if grid.has_zero else 0.0
    if found.low is None or limits is None:
        scale = scale_from_bound(found.high, grid.bound, grid.unit, empty)
        if po2:
            scale = scale_grids.ceil_to_power_of_two(scale)
        elif dtype is not None:
            arguments = found.high, grid.bound, grid.unit, empty, dtype, scale_shared
            may_clip = not grid.needs_noise
            scale = scale_grids.round_scale(scale, *arguments, may_clip=may_clip)
        return scale, None
    smallest, largest = limits
    low, high = jnp.minimum(found.low, 0.0), jnp.maximum(found.high, 0.0)
    # Halved first: the difference itself may overflow.
    half = exact.algebraic_barrier(high * 0.5 - low * 0.5)
    scale = scale_from_bound(half, (largest - smallest) / 2, empty=empty)
    if po2 or dtype == jnp.float8_e8m0fnu:
        # Round up: the range is no wider than the array needs.
        scale = scale_grids.ceil_to_power_of_two(scale)
    elif dtype is not None:
        bound = (largest - smallest) / 2
        scale = scale_grids.round_scale(
            scale, half, bound, 1.0, empty, dtype, scale_shared
        )
    # NaN becomes an arbitrary integer, which is harmless: the scale is NaN too.
    steps = jnp.clip(exact.algebraic_barrier(low) / scale, smallest - largest, 0)
    zero_point = smallest - exact.nearest_integer(jnp.nan_to_num(steps))
    return scale, jnp.clip(zero_point, smallest, largest)


def scale_from_bound(
    bound: jax.Array, grid_bound: float, unit: float = 1.0, empty: float | None = None
) -> jax.Array:
    """The scale that maps `bound` onto ``grid_bound / unit`` in stored units.

    The scale is NaN where the bound is not finite, and `empty` where it is zero.

    Computed as a product with the reciprocal of the constant: XLA rewrites division by
    a constant this way in some programs but not in others, and the scale must be the
    same in all of them. Where the quotient would be subnormal (CPUs flush these to
    zero), the channel counts as zero.

    Args:
        bound: magnitude from the calibration, float32, not negative.
        grid_bound: bound of the grid.
        unit: scaled value of one stored unit, a power of two.
        empty: scale of an all-zero channel, None for `unit`.
    """
    factor = scale_factor(grid_bound, unit)
    nothing = unit if empty is None else empty
    return exact.on_squeezed(Elementwise(_scale, (factor, nothing)), bound)


def scale_factor(grid_bound: float, unit: float = 1.0) -> np.float32:
    """The number by which a bound is multiplied, as in `scale_from_bound`.

    >>> float(scale_factor(128.0))
    0.0078125
    """
    return np.float32(unit) / np.float32(grid_bound)


def _scale(factor: np.float32, nothing: float, bound: jax.Array) -> jax.Array:
    # XLA moves no factor of the bound through the select.
    nan = lax.full_like(bound, np.nan)
    scale = lax.mul(lax.select(lax.is_finite(bound), bound, nan), factor)
    is_nothing = lax.lt(scale, np.float32(jnp.finfo(jnp.float32).tiny))
    return lax.select(is_nothing, lax.full_like(scale, nothing), scale)

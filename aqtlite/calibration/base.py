"""The interface of a calibration, and scales from what it finds."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import scale_grids
from aqtlite.lowering import exact
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes

State = Any
"""A pytree of arrays; ``()`` for a calibration without state."""

Parameters = dict[str, jax.Array]
"""What a learned calibration trains, by name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of batches.

    A framework counts the batches, and calibrations are given their number.
    """

    batches: jax.Array
    """float32: number of batches."""

    state: State
    """What the calibration keeps of them, as its `init_state` and `update` return."""


class Range(NamedTuple):
    """The values that a grid has to reach, for each block that shares a scale."""

    high: jax.Array
    """float32: the largest value, or the largest magnitude if there is no `low`."""

    low: jax.Array | None = None
    """float32: the smallest value, for a grid with a zero point."""


class Quantized(NamedTuple):
    """An array before and after quantization, for gradients of learned parameters."""

    x: jax.Array
    """float32: what was quantized."""

    rounded: jax.Array
    """float32: what the stored values stand for."""

    scale: jax.Array
    """float32, keepdims: of the grid's values."""

    zero_point: jax.Array | None
    """int32, keepdims; None on a grid without one."""


class Calibration:
    """Chooses the range that a grid has to reach, and with it the scale.

    A calibration for symmetric grids needs `bound` alone. One for grids with a zero
    point overrides `range`. One that gathers statistics over batches also overrides
    `has_state`, `init_state` and `update`, `merge` if it can, and reads `Statistics` in
    `range`. One with parameters that an optimizer trains overrides `is_learned`,
    `init_parameters` and `parameters_gradient`, and reads the parameters in `range`.

    Subclasses are frozen dataclasses. Register one with `aqtlite.config.register` to
    write it as JSON and into checkpoints.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.bound is Calibration.bound and cls.range is Calibration.range:
            raise TypeError(f"{cls.__name__} has to override `bound` or `range`")

    @property
    def has_state(self) -> bool:
        """True if it gathers statistics, which a framework keeps from call to call."""
        return False

    @property
    def ignores_zeros(self) -> bool:
        """True if zeros among the elements change no range, so that they can pad it."""
        return False

    @property
    def is_blind(self) -> bool:
        """True if the range of an array does not depend on it.

        A NaN is then looked for beside the calibration. By default, that of one that
        gathers statistics or is learned does not.
        """
        return self.has_state or self.is_learned

    @property
    def cost_in_training(self) -> str | None:
        """What it costs at each training step, if that deserves a warning."""
        return None

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> State:
        """The state before the first batch.

        Args:
            shape: shape of the scale, which has size 1 along shared axes.
            grid: the grid.
        """
        del shape, grid
        return ()

    def update(
        self, statistics: Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> State:
        """The state after one more batch.

        Args:
            statistics: number and state of the batches before.
            x: the batch, float32, any shape.
            axes: the axes that share a scale.
            grid: the grid.
        """
        del x, axes, grid
        return statistics.state

    def merge(self, statistics: Statistics, other: Statistics, grid: Numerics) -> State:
        """The state after the batches of two, of which each has one at least.

        A calibration overrides it whose statistics do not depend on the order of
        batches, so that those of several hosts or devices can be joined.

        Args:
            statistics: statistics of some batches.
            other: statistics of other batches.
            grid: the grid.

        Raises:
            ValueError: if it is not overridden.
        """
        del statistics, other, grid
        raise ValueError(
            f"statistics of {self!r} cannot be merged: {type(self).__name__} has no "
            "`merge`, as its statistics depend on the order of the batches. Gather "
            "them under jax.jit with batches sharded over the devices, or use one that "
            "can, such as calibration.MaxOverBatches()"
        )

    @property
    def is_learned(self) -> bool:
        """True if it has parameters, which an optimizer trains."""
        return False

    def init_parameters(self, x: jax.Array, axes: Axes, grid: Numerics) -> Parameters:
        """The parameters before training, from a first batch or the weights.

        Args:
            x: float32, any shape.
            axes: the axes that share a scale.
            grid: the grid.

        Returns:
            float32 arrays of x's shape, with size 1 along `axes`, by name.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parameters")

    def parameters_gradient(
        self,
        parameters: Parameters,
        values: Quantized,
        gradient: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> Parameters:
        """The gradient of the parameters, summed over the axes that share them.

        Args:
            parameters: parameters of the forward pass.
            values: the array that was quantized, and what became of it.
            gradient: float32, of the rounded values.
            axes: the axes that share a scale.
            grid: the grid.

        Returns:
            Arrays of the shapes and names of `parameters`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parameters")

    def gradient_mask(
        self, parameters: Parameters, values: Quantized, grid: Numerics
    ) -> jax.Array | None:
        """The elements at which the gradient of the array itself passes.

        Args:
            parameters: parameters of the forward pass.
            values: the array that was quantized, and what became of it.
            grid: the grid.

        Returns:
            A bool array of the array's shape, False where it was clipped; None to let
            the grid decide (`Numerics.gradient_mask`).
        """
        del parameters, values, grid
        return None

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The magnitude to map onto the bound of a symmetric grid.

        Args:
            x: float32, any shape.
            axes: the axes that share one bound.

        Returns:
            Non-negative float32 of x's shape, with size 1 along `axes`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives a range, not a bound")

    def range(self, x: jax.Array, axes: Axes, grid: Numerics, state: Any) -> Range:
        """The values that the grid has to reach.

        Args:
            x: float32, any shape.
            axes: the axes that share a scale.
            grid: the grid.
            state: the `Statistics`, this batch included, of a calibration that gathers
                them; the parameters of a learned one; ``()`` for any other.

        Returns:
            Arrays of x's shape, with size 1 along `axes`.
        """
        del grid, state
        return Range(self.bound(x, axes))


def check_looks_at_one_array(calibration: Any, where: str) -> None:
    """Raises unless the range of an array depends on that array alone.

    Raises:
        TypeError: if it is no calibration.
        ValueError: if it gathers statistics or is learned.
    """
    what = "a calibration such as AbsMax()"
    fields.instance(Calibration, what)(calibration, where)
    if calibration.has_state or calibration.is_learned:
        what = "gathers statistics" if calibration.has_state else "is learned"
        raise ValueError(
            f"{where}={calibration!r} {what} itself; give a calibration that looks at "
            "one array"
        )


def scale_and_zero_point(
    found: Range, grid: Numerics, *, po2: bool, dtype: np.dtype | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The scale of stored values, and the zero point of a grid that has one.

    Of a grid with a `calibrated_range` from ``a`` to ``b``, the scale is
    ``(high - low) / (b - a)`` and the zero point ``a - round(low / scale)``, where the
    range is first widened to contain zero, so that zero is a stored value (Jacob et al.
    2018, arXiv:1712.05877).

    Args:
        found: by the calibration.
        grid: the grid.
        po2: round the scale up to a power of two.
        dtype: round the scale to values of this dtype, None for float32.

    Returns:
        float32, and int32 or None; of the shape of the range.

    Raises:
        ValueError: if the grid has a zero point and the calibration no `low`, or the
            other way round.
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
            f"choose a calibration for such grids, such as {fitting}"
        )
    if found.low is None or limits is None:
        # Without a zero on the grid, a scale of 0 makes one.
        empty = grid.unit if grid.has_zero else 0.0
        scale = scale_from_bound(found.high, grid.bound, grid.unit, empty)
        if po2:
            scale = scale_grids.ceil_to_power_of_two(scale)
        elif dtype is not None:
            arguments = found.high, grid.bound, grid.unit, empty, dtype
            may_clip = not grid.needs_noise
            scale = scale_grids.round_scale(scale, *arguments, may_clip=may_clip)
        return scale, None
    smallest, largest = limits
    low, high = jnp.minimum(found.low, 0.0), jnp.maximum(found.high, 0.0)
    # Halves, because the difference itself may overflow.
    half = exact.algebraic_barrier(high * 0.5 - low * 0.5)
    scale = scale_from_bound(half, (largest - smallest) / 2)
    if po2 or dtype == jnp.float8_e8m0fnu:
        # The range is as wide as the array needs: no power below it.
        scale = scale_grids.ceil_to_power_of_two(scale)
    elif dtype is not None:
        bound = (largest - smallest) / 2
        scale = scale_grids.round_scale(scale, half, bound, 1.0, 1.0, dtype)
    # NaN becomes some integer or other: the scale is NaN, too.
    steps = jnp.clip(exact.algebraic_barrier(low) / scale, smallest - largest, 0)
    zero_point = smallest - exact.nearest_integer(jnp.nan_to_num(steps))
    return scale, jnp.clip(zero_point, smallest, largest)


def scale_from_bound(
    bound: jax.Array, grid_bound: float, unit: float = 1.0, empty: float | None = None
) -> jax.Array:
    """The scale of stored values, of which `bound` takes ``grid_bound / unit``.

    It is NaN where the bound is not finite, whatever the integers of that channel are,
    and `empty` where there is nothing to map.

    The quotient is a product with the constant's reciprocal: XLA rewrites a division
    by a scalar that way in some programs and not in others, and the scale must be the
    same in all of them. Where the quotient would be subnormal (which CPUs flush to
    zero), the channel counts as zero.

    Args:
        bound: float32, not negative.
        grid_bound: the bound of the grid.
        unit: what one stored unit stands for on the grid, a power of two.
        empty: the scale of a channel of zeros, None for `unit`.
    """
    factor = np.float32(unit) / np.float32(grid_bound)
    scale = lax.mul(exact.algebraic_barrier(bound), factor)
    limits = jnp.finfo(jnp.float32)
    nan = lax.full_like(scale, np.nan)
    finite = lax.select(lax.le(scale, np.float32(limits.max)), scale, nan)
    nothing = lax.full_like(scale, unit if empty is None else empty)
    return lax.select(lax.lt(scale, np.float32(limits.tiny)), nothing, finite)

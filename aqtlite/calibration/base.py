"""The interface of calibrations."""

import dataclasses
from typing import Any, NamedTuple

import jax

from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes

State = Any
"""A pytree of arrays; ``()`` for a calibration without state."""

Parameters = dict[str, jax.Array]
"""Trained parameters of a learned calibration, by name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of batches: their number, which the library counts, and a state."""

    batches: jax.Array
    """Number of batches, float32."""

    state: State
    """State of the calibration, as returned by `init_state` and `update`."""


class Range(NamedTuple):
    """The range that a grid has to cover, for each group that shares a scale."""

    high: jax.Array
    """Largest value, or largest magnitude if there is no `low`, float32."""

    low: jax.Array | None = None
    """Smallest value, for a grid with a zero point, float32."""


class Quantized(NamedTuple):
    """An array before and after quantization, for gradients of learned parameters."""

    x: jax.Array
    """Array before quantization, float32."""

    rounded: jax.Array
    """Dequantized array, float32."""

    scale: jax.Array
    """Scale of the grid's values, float32, keepdims."""

    zero_point: jax.Array | None
    """Zero point, int32, keepdims; None on a symmetric grid."""


class Calibration:
    """Chooses the range that a grid has to cover, and with it the scale.

    A calibration for symmetric grids only needs `bound`; for grids with a zero point,
    override `range`. To gather statistics over batches, also override `has_state`,
    `init_state`, `update` and, where possible, `masked_update` and `merge`, and read
    `Statistics` in `range`. For parameters trained by an optimizer, override
    `is_learned`, `init_parameters` and `parameters_gradient`, and read the parameters
    in `range`.

    Subclasses are frozen dataclasses. Register one with `aqtlite.config.register` to
    write it as JSON and into checkpoints.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.bound is Calibration.bound and cls.range is Calibration.range:
            raise TypeError(f"{cls.__name__} has to override `bound` or `range`")

    @property
    def has_state(self) -> bool:
        """True if it gathers statistics, which are kept between calls."""
        return False

    @property
    def ignores_zeros(self) -> bool:
        """True if zeros never change the range, so that arrays can be zero-padded."""
        return False

    @property
    def is_blind(self) -> bool:
        """True if the range does not depend on the current array.

        NaN is then looked for separately. By default, True for calibrations that gather
        statistics or are learned.
        """
        return self.needs_state

    @property
    def needs_state(self) -> bool:
        """True if it keeps something between calls: statistics or parameters."""
        return self.has_state or self.is_learned

    @property
    def cost_in_training(self) -> str | None:
        """Description of a high cost per training step, for a warning; None if low."""
        return None

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> State:
        """The state before the first batch.

        Args:
            shape: shape of the scale, which has size 1 along shared axes.
            grid: number grid.
        """
        del shape, grid
        return ()

    def update(
        self, statistics: Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> State:
        """The state after one more batch.

        Args:
            statistics: statistics of the earlier batches.
            x: batch, float32, any shape.
            axes: axes that share a scale.
            grid: number grid.
        """
        del x, axes, grid
        return statistics.state

    def masked_update(
        self,
        statistics: Statistics,
        x: jax.Array,
        mask: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> State:
        """The state after one more batch, of which only some elements count.

        The result is that of `update` without the others. Override it so that batches
        may be padded (``calibrate(..., mask=)``).

        Args:
            statistics: statistics of the earlier batches.
            x: batch, float32, any shape, zero where the mask is False.
            mask: bool of the shape of x, True for elements that count.
            axes: axes that share a scale.
            grid: number grid.

        Raises:
            ValueError: if not overridden.
        """
        del statistics, x, mask, axes, grid
        raise ValueError(_takes_no_mask(self, "masked_update"))

    def merge(self, statistics: Statistics, other: Statistics, grid: Numerics) -> State:
        """Merges two statistics, each of at least one batch, into one state.

        Override it if statistics do not depend on the order of batches, so that the
        statistics of several hosts or devices can be merged.

        Args:
            statistics: statistics of some batches.
            other: statistics of other batches.
            grid: number grid.

        Raises:
            ValueError: if not overridden.
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
        """True if it has parameters that an optimizer trains."""
        return False

    def init_parameters(self, x: jax.Array, axes: Axes, grid: Numerics) -> Parameters:
        """The initial parameters, from the first batch or the weights.

        Args:
            x: first batch or weights, float32, any shape.
            axes: axes that share a scale.
            grid: number grid.

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
            values: array before and after quantization.
            gradient: gradient of the rounded values, float32.
            axes: axes that share a scale.
            grid: number grid.

        Returns:
            Arrays of the shapes and names of `parameters`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parameters")

    def gradient_mask(
        self, parameters: Parameters, values: Quantized, grid: Numerics
    ) -> jax.Array | None:
        """The elements of the array to which its gradient passes.

        Args:
            parameters: parameters of the forward pass.
            values: array before and after quantization.
            grid: number grid.

        Returns:
            Bool array of the array's shape, False where clipped; None to let the grid
            decide (`Numerics.gradient_mask`).
        """
        del parameters, values, grid
        return None

    def bound(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The magnitude to map onto the bound of a symmetric grid.

        Args:
            x: array to quantize, float32, any shape.
            axes: axes that share one bound.

        Returns:
            Non-negative float32 of x's shape, with size 1 along `axes`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives a range, not a bound")

    def range(self, x: jax.Array, axes: Axes, grid: Numerics, state: Any) -> Range:
        """The range that the grid has to cover.

        Args:
            x: array to quantize, float32, any shape.
            axes: axes that share a scale.
            grid: number grid.
            state: `Statistics`, including this batch, if the calibration gathers them;
                parameters if it is learned; ``()`` otherwise.

        Returns:
            Arrays of x's shape, with size 1 along `axes`.
        """
        del grid, state
        return Range(self.bound(x, axes))

    def masked_range(
        self, x: jax.Array, mask: jax.Array, axes: Axes, grid: Numerics
    ) -> Range:
        """The range of the elements that count, for one without state or parameters.

        By default that of `range`, if zeros never change it.

        Args:
            x: array, float32, any shape, zero where the mask is False.
            mask: bool of the shape of x, True for elements that count.
            axes: axes that share a scale.
            grid: number grid.

        Raises:
            ValueError: if zeros change the range, and it is not overridden.
        """
        del mask
        if not self.ignores_zeros:
            raise ValueError(_takes_no_mask(self, "masked_range"))
        return self.range(x, axes, grid, ())


def _takes_no_mask(calibration: Calibration, method: str) -> str:
    return (
        f"calibrate was given mask=, and {calibration!r} cannot leave out tokens: "
        f"{type(calibration).__name__} has no `{method}`. Give batches without "
        "padding, or use one that can, such as calibration.MaxOverBatches()"
    )


def check_looks_at_one_array(calibration: Any, where: str) -> None:
    """Raises unless the range depends on the current array alone.

    Raises:
        TypeError: if `calibration` is not a calibration.
        ValueError: if it gathers statistics or is learned.
    """
    what = "a calibration such as AbsMax()"
    fields.instance(Calibration, what)(calibration, where)
    if calibration.needs_state:
        what = "gathers statistics" if calibration.has_state else "is learned"
        raise ValueError(
            f"{where}={calibration!r} {what} itself; give a calibration that looks at "
            "one array"
        )

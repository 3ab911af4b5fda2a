"""Scales of static ranges: from statistics, or fixed once the statistics are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config, granularity, quantizer
from aqtlite.dimension_numbers import Axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedScale:
    """The scale of an operand, in place of the statistics that it came from.

    Conversion makes it: serving then computes no scale, and cannot gather statistics.
    """

    scale: jax.Array
    """float32, of the rank of the operand, with size 1 along axes that share one."""

    zero_point: jax.Array | None = None
    """int32, None on a grid without one."""

    bound: jax.Array | None = None
    """float32: the largest value or magnitude; it seeds the noise of a grid with
    stochastic rounding, and is None on others."""

    low: jax.Array | None = None
    """float32: the smallest value, where it seeds noise."""

    def calibrated(self) -> quantizer.Calibrated:
        """The outcome of a calibration that found it."""
        bound = self.scale if self.bound is None else self.bound
        return quantizer.Calibrated(bound, self.scale, self.zero_point, self.low)


def fix(
    x: Any, tensor: config.Tensor, contracting: Axes, path: str, state: Any
) -> FixedScale:
    """The scale that statistics give an operand.

    Args:
        x: the operand.
        tensor: how it is quantized, by a calibration that gathers statistics.
        contracting: its contracting axes.
        path: where `tensor` stands, for error messages.
        state: its statistics, or the scale itself. Statistics of no batch give NaN.

    Raises:
        ValueError: if the scale does not fit the operand.
    """
    if isinstance(state, FixedScale):
        _check_shape(x, tensor, contracting, path, state)
        return state
    calibrated = quantizer.calibrate(x, tensor, contracting, path, state["state"])
    scale = jnp.where(state["batches"] > 0, calibrated.scale, jnp.nan)
    if not tensor.needs_noise:
        return FixedScale(scale, calibrated.zero_point)
    return FixedScale(scale, calibrated.zero_point, calibrated.bound, calibrated.low)


def _check_shape(
    x: Any, tensor: config.Tensor, contracting: Axes, path: str, fixed: FixedScale
) -> None:
    layout = granularity.layout(tensor, x.shape, contracting, path)
    wanted = layout.scale_shape(x.shape)
    if fixed.scale.shape != wanted:
        raise ValueError(
            f"{path} has a fixed scale of shape {fixed.scale.shape}, and an operand of "
            f"shape {x.shape} has one of {wanted}: share the scale along all axes that "
            f"differ between batches, with {path}.calib_shared_axes, and convert again"
        )

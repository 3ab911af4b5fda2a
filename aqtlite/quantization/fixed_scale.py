"""Scales that take the place of the statistics that they came from."""

import dataclasses
from typing import Any

import jax

from aqtlite import config
from aqtlite.operations import OperandAxes
from aqtlite.quantization import granularity, quantizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedScale:
    """The scale of a static range, as conversion stores it.

    Serving then computes no scale, and cannot gather statistics.
    """

    scale: jax.Array
    """float32, of the rank of the operand, with size 1 along axes that share one."""

    zero_point: jax.Array | None = None
    """int32, None on a grid without one."""

    def calibrated(
        self, x: Any, tensor: config.Tensor, axes: OperandAxes, path: str
    ) -> quantizer.Calibrated:
        """The outcome of a calibration that found it.

        Args:
            x: the operand.
            tensor: how it is quantized.
            axes: axes of the operand.
            path: where `tensor` stands, for error messages.

        Raises:
            ValueError: if the scale is not of the operand's shape.
        """
        layout = granularity.layout(tensor, x.shape, axes, path)
        wanted = layout.scale_shape(x.shape)
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"{path} has a fixed scale of shape {self.scale.shape}, and an operand "
                f"of shape {x.shape} takes one of {wanted}: share the scale along all "
                f"axes that differ between batches, with {path}.calib_shared_axes"
            )
        # Conversion makes none for what is rounded stochastically in serving, whose
        # noise the bound would seed.
        return quantizer.Calibrated(self.scale, self.scale, self.zero_point)

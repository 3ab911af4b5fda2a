"""The straight-through estimator of one operand (Bengio et al. 2013, arXiv:1308.3432).

It says at which elements the gradient of the rounded operand passes on to the operand,
and what of it goes to the parameters of a learned calibration.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, quantizer, statistics
from aqtlite.execution import OperandExecution
from aqtlite.lowering import exact
from aqtlite.qtensor import Operand, QTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learned:
    """The residuals of an operand whose calibration is learned."""

    parameters: calibration.Parameters
    x: jax.Array
    q: QTensor

    @property
    def values(self) -> calibration.Quantized:
        """The operand before and after quantization."""
        unit = 1.0 if self.q.numerics is None else self.q.numerics.unit
        wide = dataclasses.replace(self.q, dtype=np.dtype("float32"))
        return calibration.Quantized(
            exact.float32(self.x),
            wide.dequant(),
            self.q.scale / np.float32(unit),
            self.q.zero_point,
        )

    def parameters_gradient(
        self, tensor: config.Tensor, gradient: jax.Array
    ) -> calibration.Parameters:
        """The gradient of the parameters, given that of the rounded operand.

        Raises:
            ValueError: if a class of a user's own gives other arrays.
        """
        axes = tuple(axis for axis, size in enumerate(self.q.scale.shape) if size == 1)
        found = tensor.calibration.parameters_gradient(
            self.parameters, self.values, exact.float32(gradient), axes, tensor.grid
        )
        got, wanted = (
            {name: (one.dtype.name, one.shape) for name, one in arrays.items()}
            for arrays in (found, self.parameters)
        )
        if got != wanted:
            raise ValueError(
                f"{type(tensor.calibration).__name__}.parameters_gradient must return "
                f"arrays like the parameters, {wanted}, got {got}"
            )
        return found


def learned(
    one: OperandExecution, state: Any, x: Any, q: QTensor | None
) -> Learned | None:
    """The residuals of an operand, None if its calibration is not learned."""
    if q is None or not statistics.is_learned(one.tensor):
        return None
    return Learned(state, x, q)


def gradient_mask(
    one: OperandExecution, x: Operand, q: QTensor | None, residuals: Learned | None
) -> jax.Array | None:
    """The elements at which the gradient passes; None where all of it does.

    Args:
        one: the execution of the operand.
        x: the operand.
        q: what became of it; None if it stayed in float.
        residuals: of `learned`.

    Raises:
        TypeError: if a class of a user's own gives anything but a mask.
    """
    if q is None or q.numerics is None or isinstance(x, QTensor):
        return None
    source: Any = one.tensor.calibration
    mask = None
    if residuals is not None:
        mask = source.gradient_mask(residuals.parameters, residuals.values, q.numerics)
    if mask is None:
        source = q.numerics
        mask = source.gradient_mask(quantizer.scaled(x, q.scale, source))
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape != x.shape):
        raise TypeError(
            f"{type(source).__name__}.gradient_mask must return a bool array of shape "
            f"{x.shape}, got {mask.dtype} of shape {mask.shape}"
        )
    return mask

"""The initial parameters of learned calibrations."""

from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import granularity


def init(tensor: config.Tensor, x: Any, axes: OperandAxes, path: str) -> Any:
    """Returns a learned calibration's parameters for a first batch or the weights.

    Args:
        tensor: config of an operand with a learned calibration.
        x: the operand.
        axes: axes of the operand.
        path: path of the config, for messages.

    Raises:
        TypeError: if `x` is not a float array, or if the calibration returns anything
            but a dict of float32 arrays.
    """
    check_values(tensor, path, x, path)
    if isinstance(x, QTensor):
        raise TypeError(_no_values(tensor, path, x, path))
    fixed = exact.float32(jax.lax.stop_gradient(jnp.asarray(x)))
    layout = granularity.layout(tensor, x.shape, axes, path)
    fixed, shared = layout.in_blocks(fixed)
    parameters = tensor.calibration.init_parameters(fixed, shared, tensor.grid)
    if not isinstance(parameters, dict) or not all(
        getattr(one, "dtype", None) == jnp.float32 for one in parameters.values()
    ):
        raise TypeError(
            f"{path}.calibration: {type(tensor.calibration).__name__}.init_parameters "
            f"must return a dict of float32 arrays, got {parameters!r}"
        )
    return parameters


def check_values(tensor: config.Tensor, path: str, x: Any, name: str) -> None:
    """Raises TypeError if learned parameters would be made from a shape alone.

    Args:
        tensor: config of an operand with a learned calibration.
        path: path of `tensor`, for the message.
        x: the operand, or another one that its values depend on.
        name: path of the config of `x`.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(_no_values(tensor, path, x, name))


def _no_values(tensor: config.Tensor, path: str, x: Any, name: str) -> str:
    return (
        f"{path}.calibration={tensor.calibration!r} starts at values that it reads off "
        f"the array, and {name} is a {type(x).__name__}; give a float array"
    )

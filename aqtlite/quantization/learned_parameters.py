"""The parameters of learned calibrations before training."""

from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import granularity


def init(tensor: config.Tensor, x: Any, axes: OperandAxes, path: str) -> Any:
    """The parameters of a learned calibration, from a first batch or the weights.

    Args:
        tensor: config of one operand, whose calibration is learned.
        x: the operand.
        axes: axes of the operand.
        path: path of the config, for messages.

    Raises:
        TypeError: if there are no values, or the calibration gives no parameters.
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
    """Raises TypeError if only the shape is known of what parameters are made from.

    Args:
        tensor: config of one operand, whose calibration is learned.
        path: path of the config, for the message.
        x: that operand, or another one that its values depend on.
        name: the path of the config of x.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(_no_values(tensor, path, x, name))


def _no_values(tensor: config.Tensor, path: str, x: Any, name: str) -> str:
    return (
        f"{path}.calibration={tensor.calibration!r} starts at values that it reads off "
        f"the array, and {name} is a {type(x).__name__}; give a float array"
    )

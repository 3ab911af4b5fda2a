"""The scale of channels of zeros.

It is 1, or negligible where scales multiply an operand, which 1 would dominate.
"""

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config

_NEGLIGIBLE = 2.0**-63


def scale(tensor: config.Tensor, path: str) -> float:
    """The scale of a channel of zeros, on a grid with zero.

    Args:
        tensor: config of the array.
        path: path of `tensor` in its config.
    """
    return _NEGLIGIBLE if _multiplies_an_operand(tensor, path) else tensor.grid.unit


def negligible_in(
    scales: jax.Array, found: calibration.Range, tensor: config.Tensor, path: str
) -> jax.Array:
    """Makes scales that multiply an operand negligible for channels of zeros.

    Args:
        scales: scales of an array.
        found: range from which they were calibrated.
        tensor: config of the array.
        path: path of `tensor` in its config.
    """
    if not _multiplies_an_operand(tensor, path):
        return scales
    largest = found.high if found.low is None else jnp.maximum(found.high, -found.low)
    return jnp.where(largest == 0, np.float32(_NEGLIGIBLE), scales)


def _multiplies_an_operand(tensor: config.Tensor, path: str) -> bool:
    """Whether a scale multiplies the other operand, or the gradient in `drhs`."""
    is_of_rows = path == "fwd.lhs" and tensor.blocks is None
    is_alone = tensor.grid.has_zero and not tensor.has_relative_scales
    return is_alone and (is_of_rows or tensor.scale_moves)

"""The scale of channels of zeros.

It is 1, or negligible where scales multiply an operand, which 1 would dominate.
"""

from aqtlite import config

_NEGLIGIBLE = 2.0**-63


def scale(tensor: config.Tensor, path: str) -> float:
    """The scale of a channel of zeros.

    It is 0 on a grid without zero, whose values it makes zero.

    Args:
        tensor: config of the array.
        path: path of `tensor` in its config.
    """
    if not tensor.grid.has_zero:
        return 0.0
    return _NEGLIGIBLE if _multiplies_an_operand(tensor, path) else tensor.grid.unit


def _multiplies_an_operand(tensor: config.Tensor, path: str) -> bool:
    """Whether a scale multiplies the other operand, or the gradient in `drhs`."""
    is_of_rows = path == "fwd.lhs" and tensor.blocks is None
    is_alone = tensor.grid.has_zero and not tensor.has_relative_scales
    return is_alone and (is_of_rows or tensor.scale_moves)

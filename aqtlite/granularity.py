"""The blocks of an operand that share a scale."""

from collections.abc import Sequence

from aqtlite import config
from aqtlite import dimension_numbers as dn
from aqtlite.dimension_numbers import Axes


def shared_axes(
    tensor: config.Tensor, shape: Sequence[int], contracting: Axes, path: str
) -> Axes:
    """The axes along which an operand has one scale.

    Args:
        tensor: says which; by default the contracting ones.
        shape: of the operand.
        contracting: its contracting axes.
        path: where the config stands, for error messages.

    Raises:
        ValueError: if ``calib_shared_axes`` names an axis that the operand lacks or
            names one twice.
    """
    shared = tensor.calib_shared_axes
    if shared is None:
        return contracting
    if shared == "per_tensor":
        return tuple(range(len(shape)))
    return normalize_axes(shared, shape, f"{path}.calib_shared_axes")


def scale_shape(
    tensor: config.Tensor, shape: Sequence[int], contracting: Axes, path: str
) -> tuple[int, ...]:
    """The shape of the scale of an operand: size 1 along shared axes."""
    return dn.shared_shape(shape, shared_axes(tensor, shape, contracting, path))


def noise_axes(tensor: config.Tensor, shape: Sequence[int], path: str) -> Axes:
    """The axes along which elements of an operand share their noise.

    Args:
        tensor: says which.
        shape: of the operand.
        path: where the config stands, for error messages.

    Raises:
        ValueError: if ``noise_shared_axes`` names an axis that the operand lacks or
            names one twice.
    """
    shared = tensor.noise_shared_axes or ()
    return normalize_axes(shared, shape, f"{path}.noise_shared_axes")


def normalize_axes(axes: Axes, shape: Sequence[int], what: str) -> Axes:
    """Axes counted from the front.

    Raises:
        ValueError: if one is out of range or named twice.
    """
    ndim = len(shape)
    if any(not -ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"{what}={axes} names an axis that an operand of shape {tuple(shape)} "
            "does not have"
        )
    normalized = tuple(axis % ndim for axis in axes)
    if len(set(normalized)) != len(normalized):
        raise ValueError(
            f"{what}={axes} names an axis of an operand of shape {tuple(shape)} twice"
        )
    return normalized
